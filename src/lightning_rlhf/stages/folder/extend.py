"""Longer runs: which run can go on to more steps than it was started with, and from where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_rlhf.callbacks.checkpoint_files import numbered, read_run, step_named
from lightning_rlhf.core.config import StageConfig
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.stages.folder.changes import (
    differing_keys,
    flatten,
    read_config,
    volatile,
)
from lightning_rlhf.stages.folder.ending import read_ending
from lightning_rlhf.stages.folder.folders import CHECKPOINTS, CONFIG, FINAL, folder_of
from lightning_rlhf.stages.stage import Settings


def is_longer(settings: Settings) -> bool:
    """Return whether the settings are those of the run in their folder with more steps.

    Raises ConfigError where they are and the steps made so far would have been others.
    """
    folder, stage = folder_of(settings), settings.definition
    then, now = read_config(folder / CONFIG, "overwrite=true starts over"), settings.tree
    key = f"{stage.name}.{stage.length}"
    if differing_keys(then, now, (*volatile(stage), *stage.unread)) != [key]:
        return False
    before, after = (flatten(tree).get(key) for tree in (then, now))
    if not is_less(before, after):
        return False
    check_schedule(settings, folder, f"{key} was {before}, is {after}")
    return True


def is_less(before: Any, after: Any) -> bool:
    """Return whether both are numbers and the second is the larger one."""
    return isinstance(before, int | float) and isinstance(after, int | float) and before < after


def check_schedule(settings: Settings, folder: Path, change: str) -> None:
    """Raise ConfigError where a longer run would have made other steps than the one in `folder`.

    change: the change of the length, for the message.
    """
    if found := dependent(settings):
        raise ConfigError(
            f"{folder} cannot be resumed: {change}, and the steps made so far depend on it by "
            f"{' and '.join(found)}. Give the length that it was started with, or start another run"
        )
    ending = read_ending(folder)
    if ending is not None and ending.stopped is not None:
        raise ConfigError(
            f"{folder} cannot be resumed: {change}, but the run was ended after step "
            f"{ending.last_step}, as a longer one would be: {ending.stopped}"
        )


def dependent(settings: Settings) -> list[str]:
    """Return the keys by which each step depends on the length of the run, with what is allowed."""
    config: StageConfig = settings.config
    name = settings.stage
    reasons = {
        f"{name}.lr_schedule={config.lr_schedule} (allowed: constant)":
            config.lr_schedule != "constant",
        f"{name}.warmup_fraction={config.warmup_fraction:g} (allowed: 0)":
            config.warmup_fraction > 0,
        f"{name}.kl_control=linear (allowed: fixed, adaptive)":
            isinstance(config, PPOConfig) and config.kl_control == "linear",
    }  # fmt: skip
    return [key for key, depends in reasons.items() if depends]


def check_longer(settings: Settings, checkpoint: Path, steps: int) -> None:
    """Raise ConfigError where a longer run evaluates at other steps than the one in its folder.

    checkpoint: the one to resume from. steps: number of steps of the longer run.
    """
    folder, name = folder_of(settings), settings.stage
    if not is_longer(settings):
        return
    config: StageConfig = settings.config
    run, every = read_run(checkpoint), config.validation_interval(steps)
    if run["val_every"] != every:
        raise ConfigError(
            f"{folder} cannot be resumed: it evaluated every {run['val_every']} steps, and a run "
            f"of {steps} evaluates every {every} ({name}.val_every). Start another run"
        )
    kept = [step_named(path) for path in numbered(folder / CHECKPOINTS)]
    is_end = (folder / FINAL).is_dir() and run["step"] == max(kept, default=run["step"])
    if is_end and run["step"] % every:
        others = [f"resume={step:06d}" for step in kept if step < run["step"]]
        way = f"give {others[-1]}" if others else "start another run"
        raise ConfigError(
            f"{folder} cannot be resumed from its end: the evaluation after step {run['step']} is "
            f"none that a longer run makes, every {every} steps ({name}.val_every); {way}"
        )
