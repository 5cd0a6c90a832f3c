"""Metrics of a finished stage with their 95% intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlhf.callbacks.samples import SAMPLES
from lightning_rlhf.io.reading import json_lines
from lightning_rlhf.report.estimates import Interval, interval95, resampled_means
from lightning_rlhf.rewards.prefixes import EVAL_PART, JUDGE

ACCURACY, FITNESS_ACCURACY = "eval/accuracy", "fitness/accuracy"
COLUMNS = {
    "eval/reward_mean": "score",
    "eval/kl": "kl",
    "eval/response_tokens": "tokens",
    "eval/ended": "ended",
}
"""Metric that is a mean over evaluation samples -> its key in a sample."""
SEED = 0
"""Seed of the bootstrap, so that the same run has the same intervals."""

Samples = list[dict[str, Any]]


@dataclass(frozen=True)
class Measured:
    """A metric, or its gain over the value before the stage, with what is known of its error."""

    value: float
    interval: Interval | None
    """95% interval by a bootstrap over prompts; None where the stage keeps no rows of the metric,
    or has a single prompt."""

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.3f}"
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


@dataclass(frozen=True)
class StageResult:
    """Metrics of a finished stage, and the rows from which their intervals are computed."""

    metrics: Mapping[str, float]
    """Metrics in the manifest of `final/`."""
    first: Samples
    """Samples of the first evaluation; empty where the stage keeps none."""
    last: Samples
    """Samples of the last evaluation, of the same prompts; empty where the stage keeps none."""

    @classmethod
    def read(cls, metrics: Mapping[str, float], folder: Path) -> StageResult:
        """Read the samples in a stage's folder. Raises CheckpointError for a damaged file."""
        files = sorted((folder / SAMPLES).glob("eval_*.jsonl"))
        ends = [[sample for _, sample in json_lines(file)] for file in (files[:1] + files[-1:])]
        first, last = ends or ([], [])
        return cls(metrics, first, last)

    def metric(self, name: str) -> Measured | None:
        """Return a metric; None where it was not measured."""
        if name not in self.metrics:
            return None
        return Measured(self.metrics[name], self._interval(name))

    def gain(self, name: str) -> Measured | None:
        """Return the increase of a metric over the stage; None where it was not measured.

        The interval is that of the differences between responses to the same prompt.
        """
        start = f"start/{name}"
        if not {name, start} <= self.metrics.keys():
            return None
        before, after = (column(samples, name) for samples in (self.first, self.last))
        paired = len(before) == len(after)
        interval = bootstrap(after - before, self.last) if paired else None
        return Measured(self.metrics[name] - self.metrics[start], interval)

    def _interval(self, name: str) -> Interval | None:
        low, high = (self.metrics.get(f"{FITNESS_ACCURACY}_{end}") for end in ("low", "high"))
        if name == ACCURACY and low is not None and high is not None:
            return low, high
        return bootstrap(column(self.last, name), self.last)


def column(samples: Samples, name: str) -> np.ndarray:
    """Return a metric's number of each sample, NaN where a sample has none."""

    def number(sample: Mapping[str, Any]) -> Any:
        if name.startswith(JUDGE):
            return sample["judge"].get(name.removeprefix(JUDGE))
        if name.startswith(EVAL_PART):
            return sample["parts"].get(name.removeprefix(EVAL_PART))
        return sample[COLUMNS[name]] if name in COLUMNS else None

    return np.array([number(sample) for sample in samples], dtype=float)


def bootstrap(values: np.ndarray, samples: Samples) -> Interval | None:
    """Return the 95% interval of the mean of the values that are not NaN.

    Whole prompts are drawn, with all their samples. None with fewer than two prompts.
    """
    known = np.isfinite(values)
    prompts = np.array([sample["index"] for sample in samples], dtype=int)[known]
    _, clusters = np.unique(prompts, return_inverse=True)
    if clusters.size == 0 or clusters.max() == 0:
        return None
    groups = np.zeros(len(clusters), dtype=int)
    return interval95(resampled_means(values[known], groups, clusters, SEED)[:, 0])
