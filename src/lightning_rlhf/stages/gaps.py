"""The check that metrics.csv and the samples hold all that a run wrote before a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lightning_rlhf.callbacks.checkpoint_files import numbered, read_run, step_of
from lightning_rlhf.callbacks.metrics_file import read_rows
from lightning_rlhf.callbacks.samples import COUNT, eval_samples, read_samples, train_samples
from lightning_rlhf.core.config import EvalConfig
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.stages.console import say
from lightning_rlhf.stages.folders import METRICS, folder_of
from lightning_rlhf.stages.settings import AUTO, Settings


def check_no_gap(path: Path, settings: Settings) -> None:
    """Raise CheckpointError where rows or samples of steps up to the checkpoint are missing.

    Checkpoints are written after them, so only a damaged disk or another program removes them.
    With a checkpoint that is named the run goes on all the same, after a warning.
    """
    gap = first_gap(settings, path)
    if gap is None:
        return
    step = step_of(path)
    lacks = f"{gap}; the checkpoint of step {step} was written after it"
    if settings.resume not in (True, AUTO):
        say(f"warning: {lacks}; the run goes on without", "yellow")
        return
    others = [p for p in reversed(numbered(path.parent)) if p != path]
    whole = next((p.stem for p in others if first_gap(settings, p) is None), None)
    earlier = f"resume={whole}, up to which nothing is missing, or " if whole else ""
    raise CheckpointError(f"{lacks}. Give {earlier}resume={step:06d} to go on without")


def first_gap(settings: Settings, path: Path) -> str | None:
    """Return the file and the first step that it lacks of those up to a checkpoint; None if none.

    path: the checkpoint.
    """
    run = read_run(path)
    return next(gaps(settings, run["step"], run["val_every"]), None)


def gaps(settings: Settings, step: int, val_every: int) -> Iterator[str]:
    """Yield each file that lacks a step up to `step`, with the first one that it lacks.

    val_every: steps between the run's validations.
    """
    folder, config = folder_of(settings), settings.config
    assert not isinstance(config, EvalConfig)  # which has no checkpoints
    evaluated = range(val_every, step, val_every)
    every = 1 if isinstance(config, PPOConfig) else settings.trainer.log_every_n_steps
    due = {*range(every, step + 1, every), *evaluated}
    if missing := due - read_rows(folder / METRICS).keys():
        yield f"{folder / METRICS} lacks the row of step {min(missing)}"
    if not isinstance(config, PPOConfig):
        return
    file, count = train_samples(folder), min(COUNT, config.rollout_batch_size)
    lines = read_samples(file) if file.is_file() else []
    found = Counter(iteration for _, iteration in lines)
    for iteration in range(config.samples_every, step + 1, config.samples_every):
        if found[iteration] < count:
            yield f"{file} lacks samples of iteration {iteration}"
    for iteration in (0, *evaluated):
        if not eval_samples(folder, iteration).is_file():
            yield f"{eval_samples(folder, iteration)} is missing"
