"""The check at the end of a stage that updates were made and the weights are finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import lightning as L

from lightning_rlhf.callbacks.contract import position
from lightning_rlhf.callbacks.finite import advice, require_finite_weights
from lightning_rlhf.callbacks.metrics_file import read_rows
from lightning_rlhf.core.errors import TrainingError
from lightning_rlhf.stages.folder.folders import METRICS

REFUSED: Mapping[str, str] = {
    "update/nonfinite": "with a loss or gradient that is not finite",
    "update/skipped": "above ppo.max_ratio",
    "update/stopped": "above ppo.target_kl",
}
"""Metric -> description of the updates that it counts."""


def check_learned(stage: str, folder: Path, trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise TrainingError unless updates were made and the trained weights are finite."""
    made = trainer.global_step
    if made == 0:
        raise TrainingError(nothing_learned(stage, refused(folder / METRICS)))
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    require_finite_weights(stage, position(trainer, module), made, trained)


def refused(metrics: Path) -> dict[str, int]:
    """Return how many updates of the whole run were not made, by each metric of REFUSED."""
    rows = read_rows(metrics).values()
    cells = {name: [float(row[name]) for row in rows if name in row] for name in REFUSED}
    return {name: int(sum(x for x in cells[name] if math.isfinite(x))) for name in REFUSED}


def nothing_learned(stage: str, counts: Mapping[str, int]) -> str:
    """Return why no update of the run was made, and what to change. counts: as of `refused`."""
    found = [f"{counts[name]} {which}" for name, which in REFUSED.items() if counts[name]]
    limits = [REFUSED[name].split()[-1] for name in list(REFUSED)[1:] if counts[name]]
    remedy = f"A larger {' and a larger '.join(limits)}, or null, lets updates through"
    return (
        f"{stage} has learned nothing, and writes no final/: none of its updates was made "
        f"({', '.join(found)}). {remedy if limits else advice(stage, 0)}"
    )
