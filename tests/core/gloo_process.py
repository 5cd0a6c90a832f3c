"""One process of test_processes.py: its share of a batch, with real collectives over gloo.

Run as `python gloo_process.py FOLDER RANK PROCESSES`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, distributed

from lightning_rlhf.core.experience import make_experience
from lightning_rlhf.core.shaping import ScoreMoments


def over_processes(x: Tensor) -> Tensor:
    total = x.clone()
    distributed.all_reduce(total)
    return total


def main(folder: Path, rank: int, processes: int) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=processes
    )
    rollout, scores, config = torch.load(folder / f"in{rank}.pt", weights_only=False)
    moments = ScoreMoments.none(1).including(scores, over_processes)
    experience = make_experience(
        rollout, scores, config, kl_coef=0.5, moments=moments, total=over_processes
    )
    torch.save((experience, asdict(moments)), folder / f"out{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
