"""The recorded iterations of a run, and the checkpoint from which a replay starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lightning_rlhf.callbacks.checkpoint_files import BEST, SUFFIX, numbered, step_named, step_of
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.data.rollouts import recorded_iterations
from lightning_rlhf.stages.folder.folders import CHECKPOINTS


def checkpoint_until(folder: Path, iteration: int) -> tuple[int, Path | None]:
    """Return the latest checkpoint of the run not after `iteration`: (its iteration, its path).

    Checkpoints of steps are identified by their names, and not read. The best one is left out where
    it cannot be read: it only saves time.
    """
    checkpoints = folder / CHECKPOINTS
    found: dict[int, Path | None] = {0: None}
    best = checkpoints / f"{BEST}{SUFFIX}"
    if best.exists():
        with suppress(CheckpointError):
            found[step_of(best)] = best
    found |= {step_named(path): path for path in numbered(checkpoints)}
    return max((x for x in found.items() if x[0] <= iteration), key=lambda x: x[0])


def not_recorded(folder: Path, start: int, iteration: int) -> list[int]:
    """Return the iterations after `start`, up to `iteration`, that have no file."""
    recorded = recorded_iterations(folder)
    return [i for i in range(start + 1, iteration) if i not in recorded]


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges: "1-3, 7" for [1, 2, 3, 7]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
