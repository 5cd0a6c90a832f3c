"""report.html of runs that are there: of one stage, or of all stages of a recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.io.nearest_path import nearest_path
from lightning_rlhf.io.reading import read_text
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.report.run_page import PromiseRow
from lightning_rlhf.stages.folder.folders import CONFIG
from lightning_rlhf.stages.registry import STAGES
from lightning_rlhf.stages.run_files import RunFiles, damage_named, read_run
from lightning_rlhf.stages.run_report import PROMISES, write

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
    return replace(run, definition=STAGES.get(run.stage))


def write_promises(folder: Path, rows: Sequence[PromiseRow]) -> None:
    """Keep the promises of a recipe for its page."""
    with written_whole(folder / PROMISES) as beside:
        beside.write_text(json.dumps([vars(row) for row in rows], indent=2) + "\n")
