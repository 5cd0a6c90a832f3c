"""Checks that the metrics and weights of a training are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from lightning_rlhf.core.config import Stage
from lightning_rlhf.core.errors import DivergedError
from lightning_rlhf.rewards.prefixes import JUDGE


def require_finite_metrics(
    stage: Stage, step: int, made: int, metrics: Mapping[str, float]
) -> None:
    """Raise DivergedError unless the metrics of the evaluation after `step` are finite.

    made: number of optimizer steps so far. Numbers of a judge are not checked.
    """
    found = [
        f"{name} is {value:g}"
        for name, value in metrics.items()
        if name.startswith("eval/") and not name.startswith(JUDGE) and not math.isfinite(value)
    ]
    if found:
        raise DivergedError(
            f"{stage} has diverged: after step {step}, {' and '.join(found)}. {advice(stage, made)}"
        )


def require_finite_weights(
    stage: Stage, step: int, made: int, weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Raise DivergedError unless every tensor of `weights`, with their names, is finite."""
    weights = list(weights)
    found = [name for name, tensor in weights if not tensor.isfinite().all()]
    if found:
        raise DivergedError(
            f"{stage} has diverged: after step {step}, {len(found)} of {len(weights)} trained "
            f"parameters are NaN or infinite (the first: {found[0]}). {advice(stage, made)}"
        )


def advice(stage: str, made: int) -> str:
    """Return what to do about numbers that are not finite after `made` optimizer steps."""
    if made == 0:
        reward = ", or a reward of enormous size" * (stage == "ppo")
        return (
            "No update was made before them, so that no learning rate did this: it is the model "
            f"that the run starts from, or its data{reward}"
        )
    reward = ", and so does a reward of enormous size" * (stage == "ppo")
    beside = "run=NAME" if stage == "sft" else "job=NAME"  # which finds what it starts from
    return (
        f"A learning rate that is too large does this{reward}. Start over (overwrite=true or "
        f"{beside}) with a smaller {stage}.lr: a resumed run keeps its numbers"
    )
