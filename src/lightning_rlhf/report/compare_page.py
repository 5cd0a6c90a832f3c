"""compare.html: runs of a stage on one page, grouped by configuration; seeds are averaged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from rich.table import Table
from rich.text import Text
from scipy.special import stdtrit

from lightning_rlhf.core.metrics import GOLD, HELD_OUT, HELD_OUT_KL, heading_of
from lightning_rlhf.io.console import visible_line
from lightning_rlhf.report.curves import PALETTE
from lightning_rlhf.report.estimates import Interval
from lightning_rlhf.report.plots import Area, Plot, Point, Series
from lightning_rlhf.report.run_page import TextTable, environment
from lightning_rlhf.report.run_plots import Curves, joined, points

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


ABSENT = "-"


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run as it is compared."""

    name: str
    """Name of the run: run/model/stage."""
    seed: str
    curves: Curves
    metrics: Mapping[str, float]
    """Metrics at the end of the run."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in their seed alone."""

    label: str
    """Values of the keys in which the groups differ."""
    runs: Sequence[ComparedRun]
    values: Mapping[str, str]
    """Key in which the groups differ -> its value in this group, as text."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Groups of runs of one stage."""

    stage: str
    unit: str
    """Unit in which steps are counted."""
    groups: Sequence[Group]
    metrics: Sequence[str]
    """Metrics of the table; the first ones are the most important."""
    plotted: Sequence[str]
    """Metrics whose curves are laid over each other."""

    def table(self) -> TextTable:
        """Return a row for each group, with the means over its seeds."""
        rows = [
            [
                group.label,
                ", ".join(run.seed for run in group.runs),
                *(
                    text(over_seeds([r.metrics[m] for r in group.runs if m in r.metrics]))
                    for m in self.metrics
                ),
            ]
            for group in self.groups
        ]
        return TextTable(
            title="Results",
            heading=["runs", "seed", *map(heading_of, self.metrics)],
            rows=rows,
            note="Mean over seeds with its 95% t-interval: mean ± t s / √n. One seed has none."
            if any(len(group.runs) > 1 for group in self.groups)
            else "",
        )

    def differences(self) -> TextTable:
        """Return the keys in which the groups differ, with a column for each group."""
        keys = list(dict.fromkeys(key for group in self.groups for key in group.values))
        return TextTable(
            title="What differs in configuration",
            heading=["key", *(group.label for group in self.groups)],
            rows=[[key, *(group.values.get(key, ABSENT) for group in self.groups)] for key in keys],
            note="" if keys else "Nothing but the seed.",
        )

    def frontiers(self) -> Iterator[TextTable]:
        """Yield the reward, and the gold score, of each group at equal KL."""
        for metric in (HELD_OUT, GOLD):
            paths = {
                id(run): joined(run.curves, HELD_OUT_KL, metric)
                for group in self.groups
                for run in group.runs
            }
            kls = common_kls(list(paths.values()))
            if not kls or not any(paths.values()):
                continue
            rows = []
            for group in self.groups:
                own = [paths[id(run)] for run in group.runs]
                means = (over_seeds([at_kl(path, kl) for path in own]) for kl in kls)
                rows.append([group.label, *map(text, means)])
            yield TextTable(
                title=f"{heading_of(metric)} at equal KL",
                heading=["KL, nats a response", *(f"{kl:.3g}" for kl in kls)],
                rows=rows,
                note="Interpolated between the evaluations of each run, at the place where its KL "
                "first reaches the value; mean over seeds.",
            )

    def curves(self) -> list[Plot]:
        """Return a plot of each metric with the mean over the seeds of each group."""
        return [
            Plot(
                title=heading_of(metric),
                x_label=self.unit,
                unit="",
                series=[series for series, _ in drawn],
                areas=[area for _, area in drawn if area is not None],
            )
            for metric in self.plotted
            if (drawn := list(self._overlaid(metric)))
        ]

    def frontier_plot(self) -> Plot:
        """Return reward against KL, a line for each run."""
        return Plot(
            title="Reward against KL on held-out prompts",
            x_label="KL to the reference, nats a response",
            unit="score",
            series=[
                Series(
                    label=group.label if run is group.runs[0] else "",
                    color=color,
                    points=joined(run.curves, HELD_OUT_KL, HELD_OUT),
                    dots=True,
                )
                for group, color in self._colored()
                for run in group.runs
            ],
        )

    def console(self) -> Iterator[Table]:
        """Yield the tables for the console."""
        for found in (self.table(), *self.frontiers(), self.differences()):
            table = Table(title=found.title, title_justify="left",
                          caption=Text(found.note), caption_justify="left")  # fmt: skip
            for k, cell in enumerate(found.heading):
                table.add_column(
                    Text(visible_line(cell)), justify="left" if k == 0 else "right", overflow="fold"
                )
            for row in found.rows:
                table.add_row(*(Text(visible_line(cell)) for cell in row))
            if found.rows or found.note:
                yield table

    def write(self, path: Path, title: str, jobs: TextTable | None = None) -> None:
        """Write the page.

        jobs: table of the jobs of a sweep, also of those without a run.
        """
        template = environment().get_template("compare.html")
        page = template.render(title=title, found=self, jobs=jobs)
        path.write_text(page, encoding="utf-8")

    def _colored(self) -> Iterator[tuple[Group, str]]:
        return zip(self.groups, itertools.cycle(PALETTE), strict=False)

    def _overlaid(self, metric: str) -> Iterator[tuple[Series, Area | None]]:
        for group, color in self._colored():
            measured = [dict(points(run.curves, metric)) for run in group.runs]
            steps, mean, low, high = mean_curve([curve for curve in measured if curve])
            if steps:
                line = list(zip(steps, mean, strict=True))
                is_sparse = metric.startswith("eval/")
                area = Area(label="", color=color, opacity=0.18, x=steps, low=low, high=high)
                yield (
                    Series(label=group.label, color=color, points=line, dots=is_sparse),
                    area if len(group.runs) > 1 else None,
                )


def text(mean: object) -> str:
    """Return a mean as text; "-" where there is none."""
    return ABSENT if mean is None else str(mean)
