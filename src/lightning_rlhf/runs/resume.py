"""Start of a run: its lock, the state of its folder, and the checkpoint that it resumes from."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from filelock import Timeout

import lightning_rlhf
from lightning_rlhf.callbacks.files import (
    BEST,
    SUFFIX,
    WANDB_ID,
    Origin,
    check_checkpoint,
    numbered,
    read_rows,
    read_samples,
    read_wandb_id,
    step_named,
    train_samples,
)
from lightning_rlhf.core.errors import CheckpointError, ConfigError, HubError
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import locked, make_folder, read_text
from lightning_rlhf.models.checkpoint import digest
from lightning_rlhf.runs.folders import (
    CHECKPOINTS,
    CONFIG,
    FINAL,
    LOCK,
    METRICS,
    PARENTS,
    RUN_ID,
    changes,
    check_writable,
    folder_of,
    is_unbegun,
    read_config,
    refuse_foreign_files,
)
from lightning_rlhf.runs.parents import find_parents
from lightning_rlhf.runs.stage import AUTO, Settings

State = Literal["new", "done", "cut off", "outdated"]
Start = tuple[bool | str, bool, Path | None]
"""`resume`, `overwrite` and the checkpoint with which a run starts or resumes."""
LISTED = 6
"""Largest number of keys that an error names; the rest are counted."""


@contextmanager
def held(settings: Settings, folder: Path) -> Iterator[None]:
    """Lock `folder` against other processes inside; the system frees it when this process ends.

    The lock is a file in the folder, so that all paths to the folder share it.
    Raises ConfigError where another process holds it, or where the folder cannot be written.
    """
    check_writable("outputs", settings.outputs, folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with ExitStack() as stack:
            try:
                make_folder(folder)
                stack.enter_context(locked(folder / LOCK))
            except Timeout:
                raise ConfigError(
                    f"{folder} is being written by another process, which holds {folder / LOCK}. "
                    f"Wait until it ends, or give {name_beside(settings)} to write beside it"
                ) from None
            except OSError as error:
                raise ConfigError(
                    f"outputs={settings.outputs}: {error.strerror}: {folder}"
                ) from error
            yield
    finally:
        for path in made:
            with suppress(OSError):  # not empty: it holds a run
                path.rmdir()


def state_of(settings: Settings) -> State:
    """Return the state of the run.

    new: nothing is there, or a run that ended before its first step; done: `final/` is there;
    cut off: there is a part to resume; outdated: the checkpoints it was started from have changed.

    Raises ConfigError where the folder holds the stage with another configuration.
    """
    return "new" if is_unbegun(folder_of(settings)) else begun_state(settings)


def begun_state(settings: Settings) -> State:
    """Return the `state_of` a run whose folder has a config.json."""
    folder = folder_of(settings)
    if changed := changes(settings.definition, settings.tree, folder / CONFIG):
        more = [f"and {len(changed) - LISTED} more"] if len(changed) > LISTED else []
        shown = "; ".join([*changed[:LISTED], *more])
        raise ConfigError(
            f"{folder} holds a run of another configuration and cannot be resumed: "
            f"{shown} ({folder / CONFIG}). Give what it was started with, {name_beside(settings)} "
            "to keep both, or overwrite=true to start over"
        )
    if is_stale(settings):
        print_line(f"{folder}: the models it was started from are others now")
        return "outdated"
    return "done" if (folder / FINAL).is_dir() else "cut off"


def decide(settings: Settings) -> Start | None:
    """Return how a run starts or resumes; None where it has finished. Changes no file.

    resume=auto resumes from the newest checkpoint that is whole; it starts what was cut off before
    its first checkpoint over, but never a run that has checkpoints.
    Raises ConfigError where a run would be overwritten, where the folder holds another run or where
    there is nothing to resume, and CheckpointError where a file that is read is damaged.
    """
    folder, resume = folder_of(settings), settings.resume
    check_writable("outputs", settings.outputs, folder)
    final = folder / FINAL
    if os.path.lexists(final) and not final.is_dir():
        raise CheckpointError(f"{final} is no folder, in the place of that of a run. Move it away")
    if not resume:
        refuse_foreign_files(folder)
    beside = name_beside(settings)
    if settings.overwrite:
        for parent in find_parents(settings).values():
            if parent.path.resolve().is_relative_to(folder.resolve()):
                raise ConfigError(
                    f"overwrite=true would delete {folder}, and with it {parent.path}, which the "
                    f"run starts from. Give {beside} to keep both"
                )
        return False, True, None
    if is_unbegun(folder) and resume in (False, AUTO):
        refuse_foreign_files(folder)
        return False, False, None
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run to resume: no {CONFIG}; leave resume=true out")
    there, is_finished = saved(folder), final.is_dir()
    ways = f"overwrite=true to delete it and start over, or {beside} to keep both"
    auto = "" if there else "resume=auto or "
    if is_finished and resume != AUTO:
        raise ConfigError(f"{folder} holds a run that finished. Give {ways}")
    if not resume:
        go_on = "resume=true to go on, " if there else ""
        raise ConfigError(f"{folder} holds a run that was cut off. Give {go_on}{auto}{ways}")
    if not there and resume != AUTO:
        raise ConfigError(f"{folder} has no checkpoint to go on from. Give {auto}{ways}")
    if begun_state(settings) == "outdated":
        raise ConfigError(
            f"{folder} cannot be resumed: the models it was started from are others now. Give "
            f"{ways}"
        )
    if is_finished:
        print_line(f"{settings.stage}: finished already, {folder / FINAL}")
        return None
    if not there:
        print_line(
            f"{folder} holds a run that was cut off before its first checkpoint; it starts over"
        )
        return False, True, None
    if resume != AUTO:
        path = there[-1] if resume is True else folder / CHECKPOINTS / f"{resume}{SUFFIX}"
        if not path.is_file():
            names = ", ".join(sorted(p.stem for p in there))
            raise ConfigError(f"resume={resume}: {path} is not there; allowed: true, {names}")
        check_resumable(path, settings)
        return resume, False, path
    failures = []
    for path in reversed(there):
        try:
            check_resumable(path, settings)
        except CheckpointError as error:
            failures.append(error)
            continue
        for failure in failures:
            print_line(f"warning: {failure}: resume=auto goes on from {path.name}", "yellow")
        return path.stem, False, path
    raise failures[0]


def is_stale(settings: Settings) -> bool:
    """Return whether the checkpoints that the run was started from have changed since.

    A checkpoint that was deleted does not count: results made from it stay valid.
    """
    file = folder_of(settings) / PARENTS
    then = read_config(file, "delete it to go on") if file.is_file() else {}
    if not all(isinstance(was, str) for was in then.values()):
        raise CheckpointError(f"{file} is damaged: it names no digest; delete it to go on")
    try:
        now = {role: digest(final.path) for role, final in find_parents(settings).items()}
    except (CheckpointError, HubError):
        return False
    return any(now[role] != was for role, was in then.items() if role in now)


def saved(folder: Path) -> list[Path]:
    """Return the checkpoints of a run: the best one first, the one to resume from last."""
    best = folder / CHECKPOINTS / BEST
    return [*[best] * best.is_file(), *numbered(folder / CHECKPOINTS)]


def name_beside(settings: Settings) -> str:
    """Return the override that gives a run its own folder and keeps the models it starts from."""
    starts_here = not settings.definition.reads_sft and settings.job is None
    return "run=NAME" if starts_here else "job=NAME"


def check_resumable(path: Path, settings: Settings) -> None:
    """Raise CheckpointError, with a hint, where the checkpoint is damaged or of another run.

    Also where another file that the run continues is damaged.
    """
    folder = folder_of(settings)
    read_rows(folder / METRICS)
    for file, read in ((train_samples(folder), read_samples), (folder / WANDB_ID, read_wandb_id)):
        if file.exists():
            read(file)
    of_run = origin(settings)
    try:
        state = check_checkpoint(path, of_run)["state_dict"]
        if spoiled := [name for name, x in state.items() if not x.isfinite().all()]:
            raise CheckpointError(
                f"{path} cannot be resumed: {len(spoiled)} of its weights hold numbers that are "
                f"NaN or infinite, first {spoiled[0]}"
            )
    except CheckpointError as error:
        others = [p for p in numbered(path.parent) if p != path]
        before = [p for p in others if not path.stem.isdigit() or step_named(p) < step_named(path)]
        way = "Give overwrite=true to start over"
        if before:
            way = f"Delete it, or give resume={before[-1].stem}, to go on from the one before it"
        raise CheckpointError(f"{error}. {way}") from error


def origin(settings: Settings) -> Origin:
    """Return the origin that the run's checkpoints record."""
    version, run = lightning_rlhf.__version__, run_id(folder_of(settings))
    return Origin(stage=settings.stage, model=settings.model.name, version=version, run=run)


def run_id(folder: Path) -> str:
    """Return the identifier of the run in `folder`, which its checkpoints record."""
    file = folder / RUN_ID
    run = read_text(file)
    if re.fullmatch("[0-9a-f]{16}", run) is None:
        raise CheckpointError(
            f"{file} is damaged: found {run[:40]!r}; allowed: the 16 digits that stand in the "
            "run's checkpoints"
        )
    return run
