"""Pages of runs that are there: one run, a recipe's stages, or runs side by side."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table as RichTable
from scipy.special import stdtrit

from lightning_rlhf.core.errors import CheckpointError, ConfigError, counted
from lightning_rlhf.core.metrics import GOLD, HELD_OUT, HELD_OUT_KL, heading_of
from lightning_rlhf.evaluation.run_report import PROMISES, write
from lightning_rlhf.io.storage import relative, written_whole
from lightning_rlhf.io.user_code import nearest_path
from lightning_rlhf.report import estimates, run_page, tables
from lightning_rlhf.report.curves import KL_AXIS, PALETTE, Area, Plot, Point, Series, joined, points
from lightning_rlhf.runs import folders
from lightning_rlhf.runs.measured import RunFiles, damage_named, optional_json, read_run, unequal
from lightning_rlhf.runs.stage import STAGES, Stage, find_stage

STEPS = "steps.json"
"""Name of the file that lists the folders of a recipe's steps."""
SEED = "seed"
SHORT = 20
"""Largest number of characters of a value in a group's label."""
KL_VALUES = 5
"""Number of values of the KL at which rewards are compared."""


def write_report(folder: Path) -> Path:
    """Write report.html of the run in a folder, or of all stages in it; return its path.

    Raises CheckpointError where there is no run, or one of its files is damaged.
    """
    runs = [folder] if (folder / folders.CONFIG).is_file() else runs_of(folder)
    if not runs:
        raise CheckpointError(
            f"{folder} holds no run{nearest_path(str(folder))}; allowed: the folder of a stage, as "
            "outputs/<run>/<model>/ppo, or the one above it"
        )
    write(list(map(read_run, runs)), folder)
    return folder / folders.PAGE


def runs_of(folder: Path) -> list[Path]:
    """Return the runs of the steps of a recipe in their order, then of other stages in `folder`.

    Raises CheckpointError where the list of steps is damaged.
    """
    with damage_named(folder / STEPS) as path:
        steps = [folder / name for name in optional_json(path) or ()]
    found = dict.fromkeys([*steps, *(folder / name for name in STAGES)])
    return [path for path in found if (path / folders.CONFIG).is_file()]


def keep_recipe(
    folder: Path, runs: Sequence[Path], promises: Sequence[run_page.PromiseRow] | None
) -> None:
    """Keep what the page of a recipe shows: its runs, all below `folder`, and its promises.

    promises: None keeps those that are there.
    """
    kept: dict[str, Any] = {STEPS: [path.relative_to(folder).as_posix() for path in runs]}
    kept |= {} if promises is None else {PROMISES: list(map(vars, promises))}
    for name, content in kept.items():
        with written_whole(folder / name) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")


def over_seeds(values: Sequence[float]) -> str:
    """Return the mean of a number over seeds with its 95% interval, as text; "-" without a number.

        mean +- t_{0.975, n-1} s / sqrt(n),   s^2 = sum (x - mean)^2 / (n - 1)

    A single seed has no interval; values that are not finite are left out.

    Source: Student 1908, The probable error of a mean, Biometrika 6(1)
    """
    known = [x for x in values if math.isfinite(x)]
    if not known:
        return tables.ABSENT
    mean, n = fmean(known), len(known)
    if n == 1:
        return f"{mean:z.3f}"
    reach = float(stdtrit(n - 1, 0.975)) * stdev(known) / math.sqrt(n)
    return f"{mean:z.3f}{estimates.interval_text((mean - reach, mean + reach))}"


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


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in their seed alone."""

    label: str
    """Values of the keys in which the groups differ."""
    runs: Sequence[RunFiles]
    values: Mapping[str, str]
    """Key in which the groups differ -> its value in this group, as text."""


@dataclass(frozen=True)
class RunComparison:
    """Groups of runs of one stage."""

    stage: str
    unit: str
    """Unit in which steps are counted."""
    groups: Sequence[SeedGroup]
    metrics: Sequence[str]
    """Metrics of the table; the first ones are the most important."""
    plotted: Sequence[str]
    """Metrics whose curves are laid over each other."""
    unequal: Sequence[str] = ()
    """Names of what differs between the evaluations of the runs: held-out data, rewards."""

    def results(self) -> tables.Table:
        """Return a row for each group, with the means over its seeds."""
        rows = []
        for group in self.groups:
            measured = [[x.metrics[m] for x in group.runs if m in x.metrics] for m in self.metrics]
            seeds = ", ".join(str(run.tree.get(SEED)) for run in group.runs)
            rows.append([group.label, seeds, *map(over_seeds, measured)])
        columns = ["runs", "seed", *map(heading_of, self.metrics)]
        note = "Mean over seeds with its 95% t-interval: mean ± t s / √n. One seed has none."
        note *= any(len(group.runs) > 1 for group in self.groups)
        if self.unequal:
            warning = f"Not comparable: evaluated with different {' and '.join(self.unequal)}."
            note = f"{warning} {note}".strip()
        return tables.Table(title="Results", columns=columns, rows=rows, note=note)

    def differences(self) -> tables.Table:
        """Return the keys in which the groups differ, with a column for each group."""
        values = [group.values for group in self.groups]  # all with the same keys
        return tables.Table(
            title="What differs in configuration",
            columns=["key", *(group.label for group in self.groups)],
            rows=[[key, *(own[key] for own in values)] for key in values[0]],
            note="" if values[0] else "Nothing but the seed.",
        )

    def frontiers(self) -> Iterator[tables.Table]:
        """Yield the reward, and the gold score, of each group at equal KL."""
        fair = () if "held-out data" in self.unequal else (HELD_OUT, GOLD)
        for metric in fair[-1:] if self.unequal else fair:
            paths = [
                [joined(run.curves, HELD_OUT_KL, metric) for run in group.runs]
                for group in self.groups
            ]
            kls = common_kls(list(chain(*paths)))
            if not kls or not any(chain(*paths)):
                continue
            rows = [
                [group.label, *(over_seeds([at_kl(path, kl) for path in own]) for kl in kls)]
                for group, own in zip(self.groups, paths, strict=True)
            ]
            yield tables.Table(
                title=f"{heading_of(metric)} at equal KL",
                columns=["KL, nats a response", *(f"{kl:.3g}" for kl in kls)],
                rows=rows,
                note="Interpolated between the evaluations of each run, at the place where its KL "
                "first reaches the value; mean over seeds.",
            )

    def curves(self, metric: str) -> Plot:
        """Return a plot of a metric with the mean over the seeds of each group.

        It has the steps that all runs of the group have.
        """
        lines, areas, dots = [], [], metric.startswith("eval/")
        for group, color in zip(self.groups, cycle(PALETTE), strict=False):
            measured = [dict(points(run.curves, metric)) for run in group.runs]
            known = [curve for curve in measured if curve]
            steps = sorted(set.intersection(*map(set, known))) if known else []
            rows = [[curve[step] for curve in known] for step in steps]
            line = list(zip(steps, map(fmean, rows), strict=True))
            if steps:
                lines.append(Series(label=group.label, color=color, points=line, dots=dots))
            if steps and len(group.runs) > 1:
                low, high = list(map(min, rows)), list(map(max, rows))
                areas.append(Area(label="", color=color, opacity=0.18, x=steps, low=low, high=high))
        return Plot(title=heading_of(metric), x_label=self.unit, unit="", series=lines, areas=areas)

    def console(self) -> Iterator[RichTable]:
        """Yield the tables for the console."""
        for found in (self.results(), *self.frontiers(), self.differences()):
            if found.rows or found.note:
                yield found.console()

    def write(self, path: Path, title: str, jobs: tables.Table | None = None) -> None:
        """Write the page. jobs: table of the jobs of a sweep, also of those without a run."""
        wide = "numbers stacked"
        curves = [plot for plot in map(self.curves, self.plotted) if plot.series]
        note = "Lines are means over seeds; areas reach from the lowest to the highest seed."
        frontiers = [table.html(wide) for table in self.frontiers()]
        series, names = [], []
        for group, color in zip(self.groups, cycle(PALETTE), strict=False):
            for run in group.runs:
                label = group.label if run is group.runs[0] else ""
                line = joined(run.curves, HELD_OUT_KL, HELD_OUT)
                series.append(Series(label=label, color=color, points=line, dots=True))
                page, text = run.folder / folders.PAGE, f"{run.name}, seed {run.tree.get(SEED)}"
                address = relative(page, path.parent) if page.is_file() else ""
                names.append((f"{group.label}: {text}", address))
        heading = "Reward against KL on held-out prompts"
        by_kl = Plot(title=heading, x_label=KL_AXIS, unit="score", series=series)
        sections = [
            ("", self.results().html(wide)),
            ("", "" if jobs is None else jobs.html("jobs")),
            ("Curves", run_page.part("plots", curves, note, True)),
            *(("", table) for table in frontiers[:1]),
            ("", run_page.part("plots", [by_kl] if frontiers and not self.unequal else [])),
            *(("", table) for table in frontiers[1:]),
            ("", self.differences().html(wide)),
            ("Runs", run_page.part("links", names)),
        ]
        run_page.write_page(path, title, [run_page.StageReport(sections=sections)])


def compare_runs(places: Sequence[Path], stage: str | None, *, minimum: int) -> RunComparison:
    """Return the comparison of all runs of one stage in and below the folders.

    stage: name of the stage; None for that of all runs, or for ppo if there are several.
    minimum: smallest number of runs, 1 or 2.
    Raises ConfigError where fewer runs are found, and CheckpointError for a damaged one.
    """
    found = dict.fromkeys(path for place in places for path in runs_in(place))
    trees = [folders.read_config(path / folders.CONFIG, "leave it out") for path in found]
    stages = [str(tree.get("stage")) for tree in trees]
    names = sorted(set(stages))
    chosen = stage or (names[0] if len(names) == 1 else "ppo")
    runs = [read_run(path) for path, name in zip(found, stages, strict=True) if name == chosen]
    if len(runs) < minimum:
        others = [name for name in names if name != chosen]
        hint = f"; it has runs of stage={', '.join(others)} too, which --stage=NAME chooses"
        raise ConfigError(
            f"{', '.join(map(str, places))} has {counted(len(runs), 'run')} of stage={chosen}; "
            "allowed: 2 or more to compare, as outputs/one/tiny/ppo outputs/two/tiny/ppo, or a "
            f"folder above them{hint * bool(others)}"
        )
    definition = find_stage(chosen)
    known = definition or Stage
    measured = {name for run in runs for name in (*run.curves, *run.metrics)}
    first = [name for name in dict.fromkeys([*known.summary, GOLD]) if name in measured]
    plotted = [name for name in dict.fromkeys([*first, *known.headlines]) if name in measured]
    evaluated = sorted(name for name in measured if name.startswith("eval/"))
    unit, groups = "step" if definition is None else definition.unit, grouped(runs)
    shown = first or evaluated, plotted or evaluated
    return RunComparison(chosen, unit, groups, *shown, unequal(runs))


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs in and below a folder.

    Raises CheckpointError where there is none.
    """
    found = sorted(
        path.parent  # a folder of a model has a config.json as well
        for path in folder.rglob(folders.CONFIG)
        if path.parent == folder or (path.parent / folders.METRICS).is_file()
    )
    if not found:
        raise CheckpointError(
            f"{folder} holds no run{nearest_path(str(folder))}; allowed: folders of runs, as "
            "outputs/<run>/<model>/ppo, or folders above them"
        )
    return found


def grouped(runs: Sequence[RunFiles]) -> list[SeedGroup]:
    """Return the runs in groups that differ in their seed alone, in the order of the runs.

    A second run of a seed is the first of another group: it would count as an independent one. Keys
    that do not change a run's results, or that its stage does not read, are left out.
    """
    stages = [run.definition for run in runs if run.definition is not None]
    ignored = {SEED, *(key for one in stages for key in (*folders.volatile(one), *one.unread))}
    groups: list[list[RunFiles]] = []
    for run in runs:
        for group in groups:
            is_new = run.tree.get(SEED) not in [other.tree.get(SEED) for other in group]
            if is_new and not folders.differing_keys(run.tree, group[0].tree, ignored):
                group.append(run)
                break
        else:
            groups.append([run])
    trees = [group[0].tree for group in groups]
    differing = (folders.differing_keys(tree, trees[0], ignored) for tree in trees[1:])
    keys = sorted({*chain(*differing)})
    values, by_values, by_names = list[dict[str, str]](), [], []
    for group, flat in zip(groups, map(folders.flatten, trees), strict=True):
        own = {key: flat.get(key, "not there") for key in keys}
        texts = {key: json.dumps(x, ensure_ascii=False) for key, x in own.items()}
        texts |= {key: x for key, x in own.items() if isinstance(x, str)}
        values.append(texts)
        short = {key.rpartition(".")[2]: x for key, x in texts.items() if len(x) <= SHORT}
        by_values.append(", ".join(f"{key}={x}" for key, x in short.items()))
        # r/m/ppo of r/m/seed=1/ppo and r/m/seed=2/ppo
        parts = zip(*(run.name.split("/") for run in group), strict=False)
        by_names.append("/".join(part[0] for part in parts if len({*part}) == 1))
    for labels in (by_values, by_names, [group[0].name for group in groups]):
        if len({*labels}) == len(labels) and all(labels):
            break
    return list(map(SeedGroup, labels, groups, values))
