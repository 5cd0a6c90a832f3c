"""report.html of runs that are there: of one stage, or of all stages of a recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.report.run_page import PromiseRow
from lightning_rlhf.stages.folder.folders import CONFIG
from lightning_rlhf.stages.registry import STAGES
from lightning_rlhf.stages.run_files import RunFiles, read_run
from lightning_rlhf.stages.run_report import PROMISES, write


def write_report(folder: Path) -> Path:
    """Write report.html of the run in a folder, or of all stages in it; return its path.

    Raises CheckpointError where there is no run, or one of its files is damaged.
    """
    if (folder / CONFIG).is_file():
        return write([read(folder)], folder)
    stages = [name for name in STAGES if (folder / name / CONFIG).is_file()]
    if not stages:
        raise CheckpointError(
            f"{folder} holds no run; allowed: the folder of a stage, as outputs/<run>/<model>/ppo, "
            "or the one above it"
        )
    return write([read(folder / name) for name in stages], folder)


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
