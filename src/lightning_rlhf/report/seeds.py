"""Runs that differ in their seed alone: means with intervals, and rewards at equal KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

import numpy as np
from scipy.special import stdtrit  # quantile of Student's t

from lightning_rlhf.report.estimates import Interval
from lightning_rlhf.report.scales import Point

KL_VALUES = 5
"""Number of values of the KL at which rewards are compared."""


@dataclass(frozen=True)
class Mean:
    """Mean over seeds."""

    value: float
    interval: Interval | None
    """95% t-interval; None for a single seed."""
    seeds: int

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:z.3f}"
        return f"{self.value:z.3f} [{self.interval[0]:z.3f}, {self.interval[1]:z.3f}]"


def over_seeds(values: Sequence[float]) -> Mean | None:
    """Return the mean of a number over seeds; None without a finite number.

        mean +- t_{0.975, n-1} s / sqrt(n),   s^2 = sum (x - mean)^2 / (n - 1)

    Source: Student 1908, The probable error of a mean, Biometrika 6(1)
    """
    known = [x for x in values if math.isfinite(x)]
    if not known:
        return None
    mean = fmean(known)
    if len(known) == 1:
        return Mean(mean, None, 1)
    reach = float(stdtrit(len(known) - 1, 0.975)) * stdev(known) / math.sqrt(len(known))
    return Mean(mean, (mean - reach, mean + reach), len(known))


def common_kls(runs: Sequence[Sequence[Point]]) -> list[float]:
    """Return KL_VALUES values at equal distances, up to the largest that every run reached.

    runs: (KL, reward) of the evaluations of each run.
    """
    reached = [max((kl for kl, _ in run if math.isfinite(kl)), default=0.0) for run in runs]
    most = min(reached, default=0.0)
    return [most * (k + 1) / KL_VALUES for k in range(KL_VALUES)] if most > 0 else []


def at_kl(run: Sequence[Point], kl: float) -> float:
    """Return the reward of a run where its KL first reaches `kl`; NaN where it does not.

    Between the evaluations, in their order, KL and reward change linearly.
    """
    known = [point for point in run if all(map(math.isfinite, point))]
    for (kl_0, reward_0), (kl_1, reward_1) in pairwise(known):
        if kl_0 <= kl <= kl_1:
            share = (kl - kl_0) / (kl_1 - kl_0) if kl_1 > kl_0 else 0.0
            return reward_0 + share * (reward_1 - reward_0)
    return math.nan


def mean_curve(
    curves: Sequence[Mapping[float, float]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return steps, mean, lowest and highest value over runs, at the steps that all runs have."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    table = np.array([[curve[step] for step in steps] for curve in curves])
    if not steps:
        return [], [], [], []
    ends = table.mean(axis=0), table.min(axis=0), table.max(axis=0)
    mean, low, high = (row.tolist() for row in ends)
    return [float(step) for step in steps], mean, low, high
