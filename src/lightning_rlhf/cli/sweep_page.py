"""Table rows for the jobs of a sweep, and the page that compares their runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_rlhf.callbacks.goal import signed
from lightning_rlhf.cli.job_result import JobResult, command_line
from lightning_rlhf.cli.sweep import without_trial
from lightning_rlhf.core.config import Mode
from lightning_rlhf.io.storage import full_disk_told, written_whole
from lightning_rlhf.stages.folder.folders import FINAL, is_used
from lightning_rlhf.stages.registry import STAGES

if TYPE_CHECKING:
    from lightning_rlhf.report.run_page import TextTable
    from lightning_rlhf.report.tables import SweepRow

PAGE = "compare.html"
"""Name of the page that compares the jobs, in the folder of the sweep."""


def write_page(
    title: str,
    page: Path,
    copy: Path | None,
    results: Sequence[JobResult],
    goal: tuple[str, Mode] | None,
) -> bool:
    """Write the page that compares the jobs; return whether one of them has begun to train.

    copy: path of a copy, which another sweep of the run does not replace; None for none.
    goal: metric of a study, with its direction.
    """
    begun = {
        Path(result.folder): result.stage
        for result in results
        if result.folder is not None and is_own_run(result, Path(result.folder))
    }
    if not begun:
        return False
    from lightning_rlhf.stages.compare import compare_runs  # which imports torch

    stage = "ppo" if "ppo" in begun.values() else next(iter(begun.values()))
    found = compare_runs(list(begun), stage, fewest=1)
    with full_disk_told():
        for path in (page, *([] if copy is None else [copy])):
            with written_whole(path, kind="page") as beside:
                found.write(beside, title, jobs_table(results, goal or first_goal(stage)))
    return True


def is_own_run(result: JobResult, folder: Path) -> bool:
    """Return whether a job has begun to train in its folder.

    A finished run in the folder of a failed job is another one, as that with which it was tried
    alone with another value.
    """
    return is_used(folder) and not (result.status == "failed" and (folder / FINAL).is_dir())


def rank(goal: tuple[str, Mode], result: JobResult) -> tuple[bool, float]:
    """Return what is larger for the better job: pruned and failed ones are the last."""
    metric, mode = goal
    return result.status == "done", signed(result.metrics.get(metric, math.nan), mode)


def first_goal(stage: str | None) -> tuple[str, Mode] | None:
    """Return the metric that tells how good a run of a stage is, if one does."""
    found = STAGES.get(stage or "")
    return None if found is None else next(iter(found.goal), None)


def row(result: JobResult) -> SweepRow:
    """Return a job as a row of the table on the terminal."""
    from lightning_rlhf.report.tables import SweepRow

    shown = {name: result.metrics[name] for name in result.summary if name in result.metrics}
    words = without_trial(result.overrides)
    return SweepRow(overrides=tuple(words), status=result.status, metrics=shown)


def jobs_table(results: Sequence[JobResult], goal: tuple[str, Mode] | None) -> TextTable:
    """Return the table of all jobs on the page, with the best one below.

    goal: metric that tells which is the best, with its direction.
    """
    from lightning_rlhf.report.run_page import TextTable
    from lightning_rlhf.report.tables import shared_overrides

    shared = shared_overrides([without_trial(result.overrides) for result in results])

    def own(result: JobResult) -> str:
        return " ".join(w for w in without_trial(result.overrides) if w not in shared)

    heading = ["job", "status"]
    rows = [[own(result), result.status] for result in results]
    if any(result.failure for result in results):
        heading += ["why", "command that runs it alone"]
        for cells, result in zip(rows, results, strict=True):
            is_named = result.failure is not None and bool(result.command)
            cells += [result.failure or "", command_line(result) if is_named else ""]
    note = ""
    if goal is not None:
        metric, mode = goal
        best = max(results, key=partial(rank, goal))
        if best.status == "done" and metric in best.metrics:
            word = {"min": "Lowest", "max": "Highest"}[mode]
            note = f"{word} {metric}: {best.metrics[metric]:.4g}, {own(best) or best.text}."
    return TextTable(title="Jobs", heading=heading, rows=rows, note=note)
