"""Runs that differ in their seed alone: means with intervals, and rewards at equal KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, stdev

import numpy as np

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
    reach = t_quantile(len(known) - 1) * stdev(known) / math.sqrt(len(known))
    return Mean(mean, (mean - reach, mean + reach), len(known))


def t_quantile(df: int) -> float:
    """Return the 97.5% quantile of Student's t distribution.

    Exact for 1 and 2 degrees of freedom:

        t_1 = tan(pi (p - 1/2)),   t_2 = (2p - 1) / sqrt(2 p (1 - p)),   p = 0.975

    From 3 on the expansion in z, the normal quantile, and 1/df, within 0.2%:

        t = z + (z^3 + z)/(4 df) + (5z^5 + 16z^3 + 3z)/(96 df^2)
              + (3z^7 + 19z^5 + 17z^3 - 15z)/(384 df^3)
              + (79z^9 + 776z^7 + 1482z^5 - 1920z^3 - 945z)/(92160 df^4)

    Source: Abramowitz and Stegun 1964, Handbook of Mathematical Functions, 26.7.5
    """
    p = 0.975
    if df == 1:
        return math.tan(math.pi * (p - 0.5))
    if df == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z = NormalDist().inv_cdf(p)
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * df**4)
    )


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
