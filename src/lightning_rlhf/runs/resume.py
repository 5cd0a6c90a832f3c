"""The lock on a run's folder, and the checkpoint that a run resumes from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from filelock import Timeout

import lightning_rlhf
from lightning_rlhf.callbacks.checkpoint_files import (
    BEST,
    SUFFIX,
    Origin,
    check_checkpoint,
    numbered,
    step_named,
)
from lightning_rlhf.callbacks.logger_config import WANDB_ID, read_wandb_id
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import locked, make_folder, read_text
from lightning_rlhf.runs.changes import changes, listed
from lightning_rlhf.runs.folders import (
    CHECKPOINTS,
    CONFIG,
    FINAL,
    LOCK,
    METRICS,
    RUN_ID,
    check_writable,
    find_parents,
    folder_of,
    is_stale,
    is_unbegun,
    is_used,
    refuse_foreign_files,
)
from lightning_rlhf.runs.stage import Settings


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


def resume_point(settings: Settings) -> Path | None:
    """Return the checkpoint to resume from, or None to start over. Changes no file.

    Raises ConfigError where a run would be overwritten, or where there is nothing to resume.
    """
    folder = folder_of(settings)
    check_writable("outputs", settings.outputs, folder)
    if not settings.resume:
        refuse_foreign_files(folder)
    if settings.overwrite:
        check_apart(settings, folder)
        return None
    finished, there = (folder / FINAL).is_dir(), saved(folder)
    if not is_used(folder):
        if settings.resume:
            raise ConfigError(f"{folder} holds no run to resume; leave resume=true out")
        return None
    beside = name_beside(settings)
    auto = "" if finished or there else "resume=auto or "
    ways = f"{auto}overwrite=true to delete it and start over, or {beside} to keep both"
    if finished:
        raise ConfigError(f"{folder} holds a run that finished. Give {ways}")
    if settings.resume and there:
        check_same_run(settings, folder)
        return there[-1] if settings.resume is True else named(folder, settings.resume)
    if settings.resume:
        raise ConfigError(f"{folder} has no checkpoint to go on from. Give {ways}")
    if is_unbegun(folder):
        return None
    go_on = "resume=true to go on, " if there else ""
    raise ConfigError(f"{folder} holds a run that was cut off. Give {go_on}{ways}")


def saved(folder: Path) -> list[Path]:
    """Return the checkpoints of a run: the best one first, the one to resume from last."""
    best = folder / CHECKPOINTS / f"{BEST}{SUFFIX}"
    return [*[best] * best.is_file(), *numbered(folder / CHECKPOINTS)]


def decide(settings: Settings) -> Settings | None:
    """Resolve resume=auto: return settings that resume or start; None for a finished run.

    Raises ConfigError where the folder holds another run, and CheckpointError where the run has
    checkpoints and cannot resume from any of them: it is not started over then.
    """
    folder = folder_of(settings)
    if is_used(folder) and (folder / FINAL).is_dir():
        check_same_run(settings, folder)
        print_line(f"{settings.stage}: finished already, {folder / FINAL}")
        return None
    if not is_used(folder) or is_unbegun(folder):
        return replace(settings, resume=False)
    check_same_run(settings, folder)
    if not saved(folder):
        print_line(
            f"{folder} holds a run that was cut off before its first checkpoint; it starts over"
        )
        return replace(settings, resume=False, overwrite=True)
    failures = []
    for path in reversed(saved(folder)):
        try:
            check_resumable(path, settings)
        except CheckpointError as error:
            failures.append(error)
            continue
        for failure in failures:
            print_line(f"warning: {failure}: resume=auto goes on from {path.name}", "yellow")
        return replace(settings, resume=path.stem)
    raise failures[0]


def name_beside(settings: Settings) -> str:
    """Return the override that gives a run its own folder and keeps the models it starts from."""
    starts_here = not settings.definition.reads_sft and settings.job is None
    return "run=NAME" if starts_here else "job=NAME"


def check_apart(settings: Settings, folder: Path) -> None:
    """Raise ConfigError where the run starts from a checkpoint that it would delete."""
    for final in find_parents(settings).values():
        if final.path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"overwrite=true would delete {folder}, and with it {final.path}, which the run "
                f"starts from. Give {name_beside(settings)} to keep both"
            )


def check_same_run(settings: Settings, folder: Path) -> None:
    """Raise ConfigError unless the run in `folder` is of this configuration and these models."""
    check_same_config(settings, folder)
    if is_stale(settings):
        raise ConfigError(
            f"{folder} cannot be resumed: the models it was started from are others now. Give "
            f"overwrite=true to delete it and start over, or {name_beside(settings)} to keep both"
        )


def check_same_config(settings: Settings, folder: Path) -> None:
    """Raise ConfigError unless the run in `folder` had this configuration."""
    if changed := changes(settings.definition, settings.tree, folder / CONFIG):
        raise ConfigError(
            f"{folder} cannot be resumed: {listed(changed)} ({folder / CONFIG}). Give what it was "
            "started with, or overwrite=true to start over"
        )


def named(folder: Path, name: str) -> Path:
    """Return the checkpoint of this name. Raises ConfigError where there is none."""
    path = folder / CHECKPOINTS / f"{name}{SUFFIX}"
    if not path.is_file():
        there = sorted(p.stem for p in saved(folder))
        raise ConfigError(f"resume={name}: {path} is not there; allowed: true, {', '.join(there)}")
    return path


def check_resumable(path: Path, settings: Settings) -> None:
    """Raise CheckpointError, with a hint, where the checkpoint is damaged or of another run.

    Also where another file that the run continues is damaged.
    """
    # Imported here, since it takes seconds: errors in names are raised before.
    from lightning_rlhf.callbacks.evaluation import read_samples, train_samples
    from lightning_rlhf.callbacks.loggers import read_rows

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
