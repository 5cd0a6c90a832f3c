"""What several processes find of a batch in parts is what one finds of the whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.experience import make_experience
from lightning_rlhf.core.masking import (
    Total,
    alone,
    masked_moments,
    masked_rescale,
    masked_whiten,
)
from lightning_rlhf.core.shaping import NO_SCORES, ScoreMoments

from .configs import ppo_config
from .conftest import Ragged, close, drawn, ragged
from .rollouts import drawn_rollout

COMPUTED = ("kl", "rewards", "advantages", "returns")
RULES: dict[str, Any] = {
    "score_normalization": "running",
    "whiten_rewards": True,
    "whiten_advantages": "batch",
    "samples_per_prompt": 2,
}


def at_once(function: Callable[..., Any], parts: Sequence[Sequence[Any]]) -> list[Any]:
    """`function(*part, total)` of every part in a thread of its own; total sums over them all."""
    barrier, given_in = Barrier(len(parts), timeout=60), [torch.empty(0)] * len(parts)

    def run(rank: int) -> Any:
        def total(x: Tensor) -> Tensor:
            given_in[rank] = x
            barrier.wait()
            result = sum(given_in[1:], given_in[0])
            barrier.wait()
            return result

        return function(*parts[rank], total)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))


@drawn
@given(ragged(), st.integers(1, 3))
def test_moments_and_whitening_over_processes(batch: Ragged, size: int) -> None:
    x, mask = batch.normal(0), batch.mask
    parts = list(zip(x.split(size), mask.split(size), strict=True))
    whole = torch.stack(masked_moments(x, mask, alone))
    for found in at_once(masked_moments, parts):
        close(torch.stack(found), whole)
    for function in (masked_whiten, masked_rescale):
        close(torch.cat(at_once(function, parts)), function(x, mask), rtol=1e-7)


@drawn
@given(ragged(), st.integers(1, 3))
def test_running_moments_over_processes(batch: Ragged, size: int) -> None:
    first, second = batch.row_normal(0), 3 + 2 * batch.row_normal(1)
    parts = list(zip(first.split(size), second.split(size), strict=True))

    def two_batches(a: Tensor, b: Tensor, total: Total = alone) -> list[float]:
        moments = NO_SCORES.including(a, total).including(b, total)
        return [moments.count, moments.mean, moments.squares]

    for found in at_once(two_batches, parts):
        assert found == pytest.approx(two_batches(first, second), rel=1e-9, abs=1e-9)


ADVANTAGES = st.sampled_from(["gae", "rloo", "grpo", "dr_grpo", "reinforce++"])


@drawn
@given(ragged(), ADVANTAGES)
def test_experience_over_processes(batch: Ragged, advantage: str) -> None:
    twice = Ragged(batch.lengths * 2, batch.width, batch.seed)
    rollout, scores = drawn_rollout(twice)
    config = ppo_config(**RULES | {"advantage": advantage})

    def make(rollout: Any, scores: Any, total: Total = alone) -> Any:
        moments = ScoreMoments.none(1).including(scores, total)
        return make_experience(rollout, scores, config, kl_coef=0.5, moments=moments, total=total)

    found = at_once(make, list(zip(rollout.split(2), scores.split(2), strict=True)))
    whole = make(rollout, scores)
    for name in COMPUTED:
        joined = torch.cat([getattr(part, name) for part in found])
        close(joined, getattr(whole, name), rtol=1e-7, atol=1e-9)


def test_two_real_processes(tmp_path: Path) -> None:
    # Shares of different length: one of 4 + 1 + 2 + 3 tokens, one of 1 + 1.
    rollout, scores = drawn_rollout(Ragged((4, 1, 2, 3, 1, 1), width=4, seed=0))
    config = ppo_config(**RULES)
    for rank, rows in enumerate((slice(0, 4), slice(4, 6))):
        share = (rollout.select(rows), scores.select(rows), config)
        torch.save(share, tmp_path / f"in{rank}.pt")
    script = Path(__file__).with_name("gloo_process.py")
    running = [
        subprocess.Popen(
            [sys.executable, script, tmp_path, str(rank), "2"], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in running:
            process.kill()
    found = [torch.load(tmp_path / f"out{rank}.pt", weights_only=False) for rank in range(2)]
    moments = ScoreMoments.none(1).including(scores)
    whole = make_experience(rollout, scores, config, kl_coef=0.5, moments=moments)
    for name in COMPUTED:
        joined = torch.cat([getattr(experience, name) for experience, _ in found])
        close(joined, getattr(whole, name))
    for _, theirs in found:
        assert theirs["whole"] == pytest.approx(asdict(moments.whole), rel=1e-12)
        assert theirs["components"][0] == pytest.approx(asdict(moments.components[0]), rel=1e-12)
