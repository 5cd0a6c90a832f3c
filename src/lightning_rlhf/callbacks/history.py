"""The rules of the diagnosis, and the history of metrics that they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_rlhf.core.ppo_config import PPOConfig

IN_A_ROW = 3
"""Consecutive iterations in which a metric of a batch must be bad: a single one may be chance."""

Row = Mapping[str, float]
"""Metrics of one iteration by name."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The recent past of a run of PPO."""

    rows: Sequence[Row]
    """Metrics of the latest iterations, oldest first; `step` is the number of the iteration."""
    evaluations: Sequence[Row]
    """Metrics of the latest evaluations, oldest first; `step` as in `rows`."""
    config: PPOConfig
    """Configuration of the stage."""
    prompts_cut: float
    """Share of the training prompts that were cut, or left out, for their length."""

    def last(self, name: str, count: int) -> list[float]:
        """Return a metric in the last `count` iterations; [] unless all of them have it."""
        return column(self.rows[-count:], name, count)

    def lasts(self, name: str, is_bad: Callable[[float], bool], count: int) -> bool:
        """Return whether a metric is bad in each of the last `count` iterations."""
        found = self.last(name, count)
        return bool(found) and all(map(is_bad, found))


def column(rows: Sequence[Row], name: str, count: int) -> list[float]:
    """Return a metric of `count` rows; [] unless there are as many and all of them have it."""
    found = [row[name] for row in rows if name in row]
    return found if len(found) == count else []


Find = Callable[[History], str | None]
"""Function of the history that returns the symptom with its measured numbers, or None."""


@dataclass(frozen=True)
class Rule:
    """A symptom of a fault in training, with its likely cause and a remedy."""

    name: str
    """Name of the rule."""
    when: str
    """Condition on which the rule applies."""
    cause: str
    """Likely cause of the symptom."""
    remedy: str
    """Places to look at, and the keys of the configuration to change."""
    find: Find
    """Function that returns the symptom, or None where it is absent."""


def rule(*, when: str, cause: str, remedy: str) -> Callable[[Find], Rule]:
    """Return a decorator that makes a rule of a function, under the function's name."""

    def decorate(find: Find) -> Rule:
        return Rule(find.__name__, when, cause, remedy, find)

    return decorate
