"""Pages of runs that are there: one run, a recipe's stages, or runs side by side."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_rlhf.core.errors import CheckpointError, ConfigError, counted
from lightning_rlhf.core.metrics import GOLD
from lightning_rlhf.io.storage import read_text, written_whole
from lightning_rlhf.io.user_code import nearest_path
from lightning_rlhf.report.compare_page import ComparedRun, Comparison, Group
from lightning_rlhf.report.run_page import PromiseRow
from lightning_rlhf.stages.folder.changes import differing_keys, flatten, read_config, volatile
from lightning_rlhf.stages.folder.folders import CONFIG, METRICS, check_kinds
from lightning_rlhf.stages.measured import RunFiles, damage_named, read_run
from lightning_rlhf.stages.run_report import PROMISES, write
from lightning_rlhf.stages.stage import STAGES, find_stage

STEPS = "steps.json"
"""Name of the file that lists the folders of a recipe's steps."""


def write_report(folder: Path) -> Path:
    """Write report.html of the run in a folder, or of all stages in it; return its path.

    Raises CheckpointError where there is no run, or one of its files is damaged.
    """
    if (folder / CONFIG).is_file():
        return write([read(folder)], folder)
    runs = runs_of(folder)
    if not runs:
        raise CheckpointError(
            f"{folder} holds no run{nearest_path(str(folder))}; allowed: the folder of a stage, as "
            "outputs/<run>/<model>/ppo, or the one above it"
        )
    return write([read(path) for path in runs], folder)


def runs_of(folder: Path) -> list[Path]:
    """Return the runs of the steps of a recipe in their order, then of other stages in `folder`.

    Raises CheckpointError where the list of steps is damaged.
    """
    steps: list[Path] = []
    if (folder / STEPS).is_file():
        with damage_named(folder / STEPS) as path:
            steps = [folder / name for name in json.loads(read_text(path))]
    found = dict.fromkeys([*steps, *(folder / name for name in STAGES)])
    return [path for path in found if (path / CONFIG).is_file()]


def write_steps(folder: Path, runs: Sequence[Path]) -> None:
    """Keep the runs of the steps of a recipe, all below `folder`, for its page."""
    names = [path.relative_to(folder).as_posix() for path in runs]
    with written_whole(folder / STEPS) as beside:
        beside.write_text(json.dumps(names, indent=2) + "\n")


def read(folder: Path) -> RunFiles:
    """Return what the folder of a run holds; code of the user's own, as a stage, is not loaded.

    Raises CheckpointError where a file is damaged.
    """
    run = read_run(folder, None)
    return replace(run, definition=find_stage(run.stage))


def write_promises(folder: Path, rows: Sequence[PromiseRow]) -> None:
    """Keep the promises of a recipe for its page."""
    with written_whole(folder / PROMISES) as beside:
        beside.write_text(json.dumps([vars(row) for row in rows], indent=2) + "\n")


SEED = "seed"
SHORT = 20
"""Largest number of characters of a value in a group's label."""


def compare_runs(folders: Sequence[Path], stage: str | None, *, fewest: int) -> Comparison:
    """Return the comparison of all runs of one stage in and below the folders.

    stage: name of the stage; None for that of all runs, or for ppo if there are several.
    fewest: smallest number of runs, 1 or 2.
    Raises ConfigError where fewer runs are found, and CheckpointError for a damaged one.
    """
    found = [path for folder in folders for path in runs_in(folder)]
    for path in found:
        check_kinds(path)  # a pipe without a writer would be read for ever
    stages = {path: str(read_config(path / CONFIG, "leave it out").get("stage")) for path in found}
    names = sorted(set(stages.values()))
    chosen = stage or (names[0] if len(names) == 1 else "ppo")
    runs = [read(path) for path in dict.fromkeys(found) if stages[path] == chosen]
    if len(runs) < fewest:
        others = [name for name in names if name != chosen]
        there = f"; it has runs of stage={', '.join(others)} too, which --stage=NAME chooses"
        raise ConfigError(
            f"{', '.join(map(str, folders))} has {counted(len(runs), 'run')} of stage={chosen}; "
            "allowed: 2 or more to compare, as outputs/one/tiny/ppo outputs/two/tiny/ppo, or a "
            f"folder above them{there * bool(others)}"
        )
    groups = grouped(runs)
    definition = find_stage(chosen)
    measured = {name for run in runs for name in (*run.curves, *end_metrics(run))}
    summary = tuple(definition.summary) if definition is not None else ()
    first = [name for name in (*summary, GOLD) if name in measured]
    evaluated = sorted(name for name in measured if name.startswith("eval/"))
    headlines = definition.headlines if definition is not None else ()
    plotted = [name for name in dict.fromkeys([*first, *headlines]) if name in measured]
    return Comparison(
        stage=chosen,
        unit="step" if definition is None else definition.unit,
        groups=groups,
        metrics=list(dict.fromkeys(first or evaluated)),
        plotted=plotted or evaluated,
    )


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs in and below a folder.

    Raises CheckpointError where there is none.
    """
    found = sorted(
        path.parent for path in folder.rglob(CONFIG) if path.parent == folder or is_run(path.parent)
    )
    if not found:
        raise CheckpointError(
            f"{folder} holds no run{nearest_path(str(folder))}; allowed: folders of runs, as "
            "outputs/<run>/<model>/ppo, or folders above them"
        )
    return found


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run; one of a model has a config.json as well."""
    return (folder / METRICS).is_file()


def grouped(runs: Sequence[RunFiles]) -> list[Group]:
    """Return the runs in groups that differ in their seed alone, in the order of the runs.

    A second run of a seed is the first of another group: it would count as an independent one.
    """
    ignored = {SEED, *(key for run in runs for key in ignored_keys(run))}
    groups: list[list[RunFiles]] = []
    for run in runs:
        for group in groups:
            seeds = [other.tree.get(SEED) for other in group]
            if run.tree.get(SEED) not in seeds and not differences(run, group[0], ignored):
                group.append(run)
                break
        else:
            groups.append([run])
    first = groups[0][0]
    keys = sorted({key for group in groups[1:] for key in differences(group[0], first, ignored)})
    values = [values_of(group[0], keys) for group in groups]
    labels = [label(found) for found in values]
    if len({*labels}) < len(labels) or not all(labels):
        labels = [common_name([run.name for run in group]) for group in groups]
    if len({*labels}) < len(labels) or not all(labels):
        labels = [group[0].name for group in groups]
    return [
        Group(label=name, runs=[compared(run) for run in group], values=found)
        for name, group, found in zip(labels, groups, values, strict=True)
    ]


def common_name(names: Sequence[str]) -> str:
    """Return the parts of the names of runs that are the same in all: r/m/ppo of r/m/seed=1/ppo and
    r/m/seed=2/ppo."""
    parts = [name.split("/") for name in names]
    return "/".join(found[0] for found in zip(*parts, strict=False) if len({*found}) == 1)


def ignored_keys(run: RunFiles) -> Collection[str]:
    """Return the keys of a run that do not change its results, or that its stage does not read."""
    return () if run.definition is None else (*volatile(run.definition), *run.definition.unread)


def differences(run: RunFiles, other: RunFiles, ignored: Collection[str]) -> list[str]:
    """Return the keys in which two runs differ."""
    return differing_keys(run.tree, other.tree, ignored)


def values_of(run: RunFiles, keys: Sequence[str]) -> dict[str, str]:
    """Return the values of a run for the keys, as text."""
    flat = flatten(run.tree)
    return {key: text(flat[key]) if key in flat else "not there" for key in keys}


def label(values: Mapping[str, str]) -> str:
    """Return a group's short values as its label."""
    short = {key.rpartition(".")[2]: value for key, value in values.items()}
    return ", ".join(f"{key}={value}" for key, value in short.items() if len(value) <= SHORT)


def compared(run: RunFiles) -> ComparedRun:
    """Return a run as the page compares it."""
    return ComparedRun(
        name=run.name,
        seed=str(run.tree.get(SEED)),
        curves=run.curves,
        metrics=end_metrics(run),
    )


def end_metrics(run: RunFiles) -> dict[str, float]:
    """Return the metrics at the end of a run: the last of each, or those of its manifest."""
    last = {name: values[-1] for name, (_, values) in run.curves.items()}
    return last if run.manifest is None else last | dict(run.manifest.metrics)


def text(value: Any) -> str:
    """Return a value of a configuration as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
