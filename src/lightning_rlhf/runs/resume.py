"""Start of a run: its lock, the state of its folder, and the checkpoint that it resumes from."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from filelock import Timeout

import lightning_rlhf
from lightning_rlhf.callbacks import files
from lightning_rlhf.core.errors import CheckpointError, ConfigError, HubError
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import damaged_line, json_lines, locked, make_folder, read_text
from lightning_rlhf.models.checkpoint import digest
from lightning_rlhf.runs import folders
from lightning_rlhf.runs.stage import AUTO, Settings

State = Literal["new", "done", "cut off", "outdated"]
Start = tuple[bool | str, bool, Path | None]
"""`resume`, `overwrite` and the checkpoint with which a run starts or resumes."""
LISTED = 6
"""Largest number of keys that an error names; the rest are counted."""


@contextmanager
def locked_run(settings: Settings, folder: Path) -> Iterator[None]:
    """Lock `folder` against other processes inside; the system frees it when this process ends.

    The lock is a file in the folder, so that all paths to the folder share it.
    Raises ConfigError where another process holds it, or where the folder cannot be written.
    """
    folders.check_writable("outputs", settings.outputs, folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = folder / folders.LOCK
    try:
        with ExitStack() as stack:
            try:
                make_folder(folder)
                stack.enter_context(locked(lock))
            except Timeout:
                raise ConfigError(
                    f"{folder} is being written by another process, which holds {lock}. Wait until "
                    f"it ends, or give {name_beside(settings)} to write beside it"
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
    folder = folders.folder_of(settings)
    if folders.is_unbegun(folder):
        return "new"
    if changed := folders.changes(settings.definition, settings.tree, folder / folders.CONFIG):
        more = f"; and {len(changed) - LISTED} more" * (len(changed) > LISTED)
        raise ConfigError(
            f"{folder} holds a run of another configuration and cannot be resumed: "
            f"{'; '.join(changed[:LISTED])}{more} ({folder / folders.CONFIG}). Give what it was "
            f"started with, {name_beside(settings)} to keep both, or overwrite=true to start over"
        )
    if is_stale(settings):
        print_line(f"{folder}: the models it was started from are others now")
        return "outdated"
    return "done" if (folder / folders.FINAL).is_dir() else "cut off"


def decide(settings: Settings) -> Start | None:
    """Return how a run starts or resumes; None where it has finished. Changes no file.

    resume=auto resumes from the newest checkpoint that is whole; it starts what was cut off before
    its first checkpoint over, but never a run that has checkpoints.
    Raises ConfigError where a run would be overwritten, where the folder holds another run or where
    there is nothing to resume, and CheckpointError where a file that is read is damaged.
    """
    folder, resume = folders.folder_of(settings), settings.resume
    final, beside = folder / folders.FINAL, name_beside(settings)
    folders.check_writable("outputs", settings.outputs, folder)
    if os.path.lexists(final) and not final.is_dir():
        raise CheckpointError(f"{final} is no folder, in the place of that of a run. Move it away")
    is_new = not settings.overwrite and resume in (False, AUTO) and folders.is_unbegun(folder)
    if is_new or not resume:
        folders.refuse_foreign_files(folder)
    for parent in folders.find_parents(settings).values() if settings.overwrite else ():
        if parent.path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"overwrite=true would delete {folder}, and with it {parent.path}, which the run "
                f"starts from. Give {beside} to keep both"
            )
    if settings.overwrite or is_new:
        return False, settings.overwrite, None
    if not (folder / folders.CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run to resume: no config.json; leave out resume=true")
    checkpoints, is_finished = saved(folder), final.is_dir()
    state, way = "was cut off", "resume=true to go on, "
    if is_finished:
        state, way = "finished", ""
    elif not checkpoints:
        state, way = "was cut off and has no checkpoint to go on from", "resume=auto or "
    ways = f"overwrite=true to delete it and start over, or {beside} to keep both"
    if not resume or (resume != AUTO and (is_finished or not checkpoints)):
        raise ConfigError(f"{folder} holds a run that {state}. Give {way}{ways}")
    if state_of(settings) == "outdated":
        reason = "the models it was started from are others now"
        raise ConfigError(f"{folder} cannot be resumed: {reason}. Give {ways}")
    if is_finished:
        print_line(f"{settings.stage}: finished already, {final}")
        return None
    if not checkpoints:
        print_line(f"{folder}: cut off before its first checkpoint; it starts over")
        return False, True, None
    path = chosen_checkpoint(settings, checkpoints)
    return path.stem, False, path


def chosen_checkpoint(settings: Settings, checkpoints: list[Path]) -> Path:
    """Return the checkpoint to resume from: one by name, the newest, or the newest whole one."""
    resume = settings.resume
    if resume not in (True, AUTO):
        path = checkpoints[0].with_name(f"{resume}{files.SUFFIX}")
        if path not in checkpoints:
            names = ", ".join(sorted(p.stem for p in checkpoints))
            raise ConfigError(f"resume={resume}: {path} is not there; allowed: true, {names}")
        checkpoints = [path]
    failures: list[CheckpointError] = []
    for path in checkpoints[::-1] if resume == AUTO else checkpoints[-1:]:
        try:
            check_resumable(path, settings)
        except CheckpointError as error:
            failures.append(error)
            continue
        for failure in failures:
            print_line(f"warning: {failure}: resume=auto goes on from {path.name}", "yellow")
        return path
    raise failures[0]


def is_stale(settings: Settings) -> bool:
    """Return whether the checkpoints that the run was started from have changed since.

    A checkpoint that was deleted does not count: results made from it stay valid.
    """
    file, way = folders.folder_of(settings) / folders.PARENTS, "delete it to go on"
    then = folders.read_config(file, way) if file.is_file() else {}
    if not all(isinstance(was, str) for was in then.values()):
        raise CheckpointError(f"{file} is damaged: it names no digest; {way}")
    try:
        now = {role: digest(final.path) for role, final in folders.find_parents(settings).items()}
    except (CheckpointError, HubError):
        return False
    return any(now[role] != was for role, was in then.items() if role in now)


def saved(folder: Path) -> list[Path]:
    """Return the checkpoints of a run: the best one first, the one to resume from last."""
    best = folder / folders.CHECKPOINTS / files.BEST
    return [*[best] * best.is_file(), *files.numbered(folder / folders.CHECKPOINTS)]


def name_beside(settings: Settings) -> str:
    """Return the override that gives a run its own folder and keeps the models it starts from."""
    starts_here = not settings.definition.reads_sft and settings.job is None
    return "run=NAME" if starts_here else "job=NAME"


def check_resumable(path: Path, settings: Settings) -> None:
    """Raise CheckpointError, with a hint, where the checkpoint is damaged or of another run.

    Also where another file that the run continues is damaged.
    """
    folder = folders.folder_of(settings)
    files.read_rows(folder / folders.METRICS)
    if (samples := folder / files.TRAIN_SAMPLES).exists():
        for number, (_, sample) in enumerate(json_lines(samples), start=1):
            if type(sample.get("iteration")) is not int:
                found = f"iteration is {sample.get('iteration')!r}; allowed: an integer"
                raise damaged_line(samples, number, found)
    if (wandb_id := folder / files.WANDB_ID).exists():
        files.read_wandb_id(wandb_id)
    try:
        state = files.check_checkpoint(path, origin(settings))["state_dict"]
        if spoiled := [name for name, x in state.items() if not x.isfinite().all()]:
            raise CheckpointError(
                f"{path} cannot be resumed: {len(spoiled)} of its weights hold numbers that are "
                f"NaN or infinite, first {spoiled[0]}"
            )
    except CheckpointError as error:
        limit = int(path.stem) if path.stem.isdigit() else float("inf")
        before = [p for p in files.numbered(path.parent) if int(p.stem) < limit]
        way = "Give overwrite=true to start over"
        if before:
            way = f"Delete it, or give resume={before[-1].stem}, to go on from the one before it"
        raise CheckpointError(f"{error}. {way}") from error


def origin(settings: Settings) -> files.Origin:
    """Return the origin that the run's checkpoints record."""
    version, run = lightning_rlhf.__version__, run_id(folders.folder_of(settings))
    return files.Origin(stage=settings.stage, model=settings.model.name, version=version, run=run)


def run_id(folder: Path) -> str:
    """Return the identifier of the run in `folder`, which its checkpoints record."""
    file = folder / folders.RUN_ID
    run = read_text(file)
    if re.fullmatch("[0-9a-f]{16}", run) is None:
        allowed = "the 16 digits that stand in the run's checkpoints"
        raise CheckpointError(f"{file} is damaged: found {run[:40]!r}; allowed: {allowed}")
    return run
