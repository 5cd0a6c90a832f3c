"""The definition of a metric, and the stages that log one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_rlhf.core.config import Mode, Stage

Phase = Literal["rollout", "update", "eval", "time", "compute", "rank"]


@dataclass(frozen=True)
class Metric:
    """The definition of a logged metric."""

    formula: str
    """Formula or description of the metric."""
    unit: str
    """Unit of the metric; "1" for dimensionless ones."""
    phase: Phase
    """Part of an iteration in which the metric is measured, or what is measured of the whole."""
    stages: tuple[Stage, ...]
    """Stages that log the metric."""
    healthy: str
    """Healthy range or course of the metric."""
    better: Mode | None = None
    """Direction of a metric of an evaluation: whether the lowest or the highest value is the best;
    None where neither is."""
    band: tuple[float | None, float | None] | None = None
    """Lowest and highest healthy value, as `healthy` says it, for metrics with a fixed range; None
    for an end that is open."""


PPO: tuple[Stage, ...] = ("ppo",)
SFT: tuple[Stage, ...] = ("sft",)
RM: tuple[Stage, ...] = ("rm",)
DPO: tuple[Stage, ...] = ("dpo",)
PAIRS: tuple[Stage, ...] = ("rm", "dpo")
EVAL_POLICY: tuple[Stage, ...] = ("eval_policy",)
RANK: tuple[Stage, ...] = ("rank",)
EVALUATED: tuple[Stage, ...] = ("ppo", "eval_policy")
EVERY: tuple[Stage, ...] = ("sft", "rm", "ppo", "dpo")
