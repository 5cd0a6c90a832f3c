"""The check that metrics.csv and the samples are complete up to a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lightning_rlhf.callbacks.checkpoint_files import numbered, read_run, step_of
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.folder.folders import METRICS, folder_of
from lightning_rlhf.stages.stage import AUTO, Settings

# callbacks.metrics_file and callbacks.samples, which import Lightning, are imported where they are
# used: a stage's description names the functions below.


def check_no_gap(path: Path, settings: Settings) -> None:
    """Raise CheckpointError where rows or samples of steps up to the checkpoint are missing.

    Checkpoints are written after them, so only a damaged disk or another program removes them.
    Where the user names the checkpoint, a warning is printed instead.
    """
    gap = first_gap(settings, path)
    if gap is None:
        return
    step = step_of(path)
    lacks = f"{gap}; the checkpoint of step {step} was written after it"
    if settings.resume not in (True, AUTO):
        print_line(f"warning: {lacks}; the run goes on without", "yellow")
        return
    others = [p for p in reversed(numbered(path.parent)) if p != path]
    whole = next((p.stem for p in others if first_gap(settings, p) is None), None)
    earlier = f"resume={whole}, up to which nothing is missing, or " if whole else ""
    raise CheckpointError(f"{lacks}. Give {earlier}resume={step:06d} to go on without")


def first_gap(settings: Settings, path: Path) -> str | None:
    """Return the first file that lacks a step before the checkpoint at `path`, with that step.

    Returns None where nothing is missing.
    """
    gaps = settings.definition.gaps
    run = read_run(path)
    evaluated = range(run["val_every"], run["step"], run["val_every"])
    return None if gaps is None else next(gaps(settings, run["step"], evaluated), None)


def row_gaps(settings: Settings, step: int, evaluated: range) -> Iterator[str]:
    """Yield metrics.csv if a row up to `step` is missing that SFT or reward modelling writes."""
    return missing_rows(settings, settings.trainer.log_every_n_steps, step, evaluated)


def iteration_gaps(settings: Settings, step: int, evaluated: range) -> Iterator[str]:
    """Yield each file of PPO that lacks an iteration up to `step`: of metrics and of samples."""
    from lightning_rlhf.callbacks.samples import COUNT, eval_samples, read_samples, train_samples

    yield from missing_rows(settings, 1, step, evaluated)
    folder, config = folder_of(settings), settings.config
    file, count = train_samples(folder), min(COUNT, config.rollout_batch_size)
    lines = read_samples(file) if file.is_file() else []
    found = Counter(iteration for _, iteration in lines)
    for iteration in range(config.samples_every, step + 1, config.samples_every):
        if found[iteration] < count:
            yield f"{file} lacks samples of iteration {iteration}"
    for iteration in (0, *evaluated):
        if not eval_samples(folder, iteration).is_file():
            yield f"{eval_samples(folder, iteration)} is missing"


def missing_rows(settings: Settings, every: int, step: int, evaluated: range) -> Iterator[str]:
    """Yield metrics.csv with the first step of which it lacks the row; every: steps between."""
    from lightning_rlhf.callbacks.metrics_file import read_rows

    file = folder_of(settings) / METRICS
    due = {*range(every, step + 1, every), *evaluated}
    if missing := due - read_rows(file).keys():
        yield f"{file} lacks the row of step {min(missing)}"
