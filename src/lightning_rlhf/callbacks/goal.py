"""The metrics of an evaluation that tell how good it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import require

Goal = Sequence[tuple[str, Mode]]
"""Metrics that tell which evaluation is the best, and whether the lowest or the highest is.

A later metric decides where the ones before it are equal; among evaluations that are equal in all
of them, the earliest is the best.
"""
SIGNS = {"min": -1, "max": 1}


def signed(value: float, mode: Mode) -> float:
    """Return the value with the sign by which the larger one is better; NaN is the worst."""
    return -math.inf if math.isnan(value) else SIGNS[mode] * value


def require_metrics(key: str, goal: Goal, metrics: Mapping[str, float]) -> None:
    """Raise ConfigError naming `key` where an evaluation lacks a metric of `goal`."""
    measured = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
    for name, _ in goal:
        require(name in metrics, key, name, measured or "none, as no metric was logged")
