"""The step that becomes `final/`: the keys that decide it, and the check that it has learned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import lightning as L
import torch
from torch import nn

from lightning_rlhf.callbacks.checkpoint_files import (
    BEST,
    SUFFIX,
    Origin,
    check_checkpoint,
    numbered,
    path_of,
    read_run,
    step_named,
)
from lightning_rlhf.callbacks.checkpoints import (
    Checkpoints,
    divergence_advice,
    require_finite_weights,
)
from lightning_rlhf.callbacks.compute import PREFIX as COMPUTE
from lightning_rlhf.callbacks.loggers import read_rows
from lightning_rlhf.callbacks.progress import number_text, position
from lightning_rlhf.callbacks.stopping import AVERAGE
from lightning_rlhf.core.config import Mode, StageConfig
from lightning_rlhf.core.errors import CheckpointError, ConfigError, TrainingError, require
from lightning_rlhf.core.metrics import EVAL_PART, JUDGE
from lightning_rlhf.core.metrics import METRICS as DEFINITIONS
from lightning_rlhf.io.console import print_line
from lightning_rlhf.models.roles import trainable_names
from lightning_rlhf.modules.optim import check_parameters
from lightning_rlhf.runs.changes import Ending, Export, Value, read_ending, write_ending
from lightning_rlhf.runs.folders import METRICS
from lightning_rlhf.runs.resume import origin
from lightning_rlhf.runs.stage import Settings

Goal = tuple[tuple[str, Mode], ...]


def goal_of(settings: Settings) -> Goal:
    """Return the metrics that tell which evaluation is the best: those of `best`, or the stage's.

    Empty where neither names one.
    Raises ConfigError as `metric_of`.
    """
    config: StageConfig = settings.config
    if config.best.metric is None:
        return settings.definition.goal
    return (metric_of(settings, f"{settings.stage}.best", config.best.metric, config.best.mode),)


def stop_metric(settings: Settings) -> tuple[str, Mode] | None:
    """Return the metric that has to gain; None where neither the keys nor the stage name one.

    Raises ConfigError as `metric_of`.
    """
    config: StageConfig = settings.config
    if config.stop.metric is None:
        return next(iter(goal_of(settings)), None)
    return metric_of(settings, f"{settings.stage}.stop", config.stop.metric, config.stop.mode)


def metric_of(settings: Settings, key: str, name: str, mode: Mode | None) -> tuple[str, Mode]:
    """Return a metric of the stage's evaluations with its direction, by default the defined one.

    key: section of the configuration that names both.

    Raises ConfigError where the stage measures no such metric, or its direction is not known.
    """
    stage = settings.definition
    has_judge = stage.reads_judge and settings.data.judge is not None
    # The components of a reward that is a sum have metrics of their own.
    parts = [EVAL_PART + part for part in settings.reward] if len(settings.reward) > 1 else []
    measured = {
        name: found.better
        for pattern, found in DEFINITIONS.items()
        if stage.name in found.stages
        and pattern.startswith("eval/")
        and (has_judge or not pattern.startswith(JUDGE))
        for name in (parts if pattern.startswith(EVAL_PART) else [pattern])
    }
    known = measured | dict(stage.goal)
    pattern = next((x for x in known if "<" in x and name.startswith(x.partition("<")[0])), name)
    is_open = not measured and name.startswith("eval/")  # a stage with metrics of its own
    # A constant is of no use; a component's direction is the user's to say.
    offered = [name for name, better in known.items() if better or name in parts]
    require(pattern in known or is_open, f"{key}.metric", name, ", ".join(offered))
    found = mode or known.get(pattern)
    if found is None:
        raise ConfigError(f"{key}.mode is None; allowed for {name}: min, max")
    return name, found


def check_final(settings: Settings, steps: int) -> None:
    """Raise ConfigError where `final`, `best` or `stop` do not fit the stage or one another.

    steps: number of steps of the run.
    """
    config: StageConfig = settings.config
    stage, step = settings.stage, config.final
    key = f"{stage}.final"
    if not goal_of(settings) and step == "best":
        raise ConfigError(f"{key} is 'best', and {_no_goal(settings, 'best')}")
    if stop_metric(settings) is None and config.stop.patience is not None:
        found = config.stop.patience
        raise ConfigError(f"{stage}.stop.patience is {found}, and {_no_goal(settings, 'stop')}")
    if not isinstance(step, int):
        return
    if config.stop.is_on:
        raise ConfigError(
            f"{key} is {step}, and {stage}.stop may end the run before that step; allowed "
            "where a rule may end the run: last, best"
        )
    every = config.validation_interval(steps)
    is_evaluated = step <= steps and (step % every == 0 or step == steps)
    require(is_evaluated, key, step, f"last, best, or a step at which the run evaluates: a multiple"
            f" of {every} up to {steps}, or {steps}")  # fmt: skip


def _no_goal(settings: Settings, section: str) -> str:
    """Return that no metric tells which evaluation is better, and the key that names one."""
    return (
        f"stage={settings.stage} names no metric of its evaluations (Stage.goal); allowed with a "
        f"metric in {settings.stage}.{section}.metric"
    )


def choose(
    folder: Path,
    saver: Checkpoints,
    module: L.LightningModule,
    steps: int,
    last: int,
    reason: str | None,
) -> dict[str, float] | None:
    """Give `module` the weights of the step that becomes `final/`, and write ending.json.

    folder: folder of the run. steps: number of steps of its schedule. last: its last step.
    reason: why a rule of `stop` ended it there; None where none did.

    Returns the metrics of the evaluation of that step; None where it is the last one, whose metrics
    the Trainer has.
    """
    final = saver.config.final
    step = {"last": last, "best": saver.best_step}[final] if isinstance(final, str) else final
    assert step is not None  # the last step is evaluated
    ending = Ending(
        final=str(final),
        step=step,
        last_step=last,
        metrics=values(folder, saver.goal, step, last),
        stopped=None if last == steps else reason or "a callback",
    )
    if last != steps:
        what = "a callback" if reason is None else "a rule"
        why = "" if reason is None else f": {reason}"
        print_line(f"{what} ended the run after step {last} of {steps}{why}")
    if step != last:
        require(step < last, f"{saver.origin.stage}.final", step, f"last, best, since the run was "
                f"ended after step {last}")  # fmt: skip
        path = path_of(saver.folder, step)
        if step == saver.best_step and not path.is_file():
            path = saver.folder / f"{BEST}{SUFFIX}"
        load_weights(module, path, saver.origin)
        print_line(text_of(ending))
    write_ending(folder, ending)
    return None if step == last else measured_at(folder, step)


def export_of(folder: Path, settings: Settings, checkpoint: Path, step: int, out: Path) -> Export:
    """Return the export of a step of the run in `folder` to the folder `out`.

    The metrics of PPO include those before the first iteration, as in `final/`.
    """
    newest = max((step_named(path) for path in numbered(checkpoint.parent)), default=step)
    ending = read_ending(folder)
    last = max(newest, step) if ending is None else ending.last_step
    found = measured_at(folder, step)
    if settings.definition.validates_first and found:
        found = {f"start/{name}": x for name, x in measured_at(folder, 0).items()} | found
    found |= measured_at(folder, step, COMPUTE)
    # A run of another version may be exported: its weights have the names of this one's, or not.
    version = read_run(checkpoint)["version"]
    return Export(
        folder=out,
        checkpoint=checkpoint,
        origin=replace(origin(settings), version=version),
        metrics=found,
        ending=Ending(
            final=str(step),
            step=step,
            last_step=last,
            metrics=values(folder, goal_of(settings), step, last),
            stopped=None if ending is None else ending.stopped,
        ),
    )


def load_weights(module: nn.Module, path: Path, origin: Origin, prefix: str | None = None) -> None:
    """Load the trained parameters of a checkpoint into the module, averaged where it has averages.

    prefix: beginning of the names of the module's parameters in the checkpoint of a larger module,
        of which nothing else is read; None where `module` is the whole one.

    Raises CheckpointError where the file is damaged, of another run, or does not fit.
    """
    content = check_checkpoint(path, origin)
    state = content["state_dict"]
    if AVERAGE in content:
        state = state | content[AVERAGE]
    if prefix is not None:
        names = [name for name in trainable_names(module) if prefix + name in state]
        state = {name: state[prefix + name] for name in names}
    try:
        check_parameters(module, {"state_dict": state})
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    spoiled = [name for name, x in state.items() if not torch.isfinite(x).all()]
    if spoiled:
        raise CheckpointError(f"{path} holds numbers that are NaN or infinite, in {spoiled[0]}")
    module.load_state_dict(state, strict=False)


def measured_at(folder: Path, step: int, prefix: str = "eval/") -> dict[str, float]:
    """Return the metrics after `step` whose names have the prefix; {} where there are none."""
    rows = read_rows(folder / METRICS)
    if step not in rows:
        return {}
    return {name: float(cell) for name, cell in rows[step].items() if name.startswith(prefix)}


def values(
    folder: Path, goal: Sequence[tuple[str, Mode]], step: int, last: int
) -> dict[str, Value]:
    """Return the `goal` metrics at `step` and at the last step, by name."""
    chosen, end = measured_at(folder, step), measured_at(folder, last)

    def finite(metrics: Mapping[str, float], name: str) -> float | None:
        return metrics[name] if name in metrics and math.isfinite(metrics[name]) else None

    return {
        name: Value(mode=mode, chosen=finite(chosen, name), last=finite(end, name))
        for name, mode in goal
    }


def text_of(ending: Ending) -> str:
    """Return which step becomes `final/`, with the metrics there and at the last step."""
    found = ", ".join(
        f"{name} {number_text(value.chosen)} (last {number_text(value.last)} at step "
        f"{ending.last_step}, {'higher' if value.mode == 'max' else 'lower'} is better)"
        for name, value in ending.metrics.items()
        if value.chosen is not None and value.last is not None
    )
    return f"final/ is step {ending.step} (final={ending.final}): {found}"


REFUSED: Mapping[str, str] = {
    "update/nonfinite": "with a loss or gradient that is not finite",
    "update/skipped": "above ppo.max_ratio",
    "update/stopped": "above ppo.target_kl",
}
"""Metric -> description of the updates that it counts."""


def check_learned(stage: str, folder: Path, trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise TrainingError unless updates were made and the trained weights are finite."""
    made = trainer.global_step
    if made == 0:
        raise TrainingError(nothing_learned(stage, refused(folder / METRICS)))
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    require_finite_weights(stage, position(trainer, module), made, trained)


def refused(metrics: Path) -> dict[str, int]:
    """Return how many updates of the whole run were not made, by each metric of REFUSED."""
    rows = read_rows(metrics).values()
    cells = {name: [float(row[name]) for row in rows if name in row] for name in REFUSED}
    return {name: int(sum(x for x in cells[name] if math.isfinite(x))) for name in REFUSED}


def nothing_learned(stage: str, counts: Mapping[str, int]) -> str:
    """Return why no update of the run was made, and what to change. counts: as of `refused`."""
    found = [f"{counts[name]} {which}" for name, which in REFUSED.items() if counts[name]]
    limits = [REFUSED[name].split()[-1] for name in list(REFUSED)[1:] if counts[name]]
    remedy = f"A larger {' and a larger '.join(limits)}, or null, lets updates through"
    return (
        f"{stage} has learned nothing, and writes no final/: none of its updates was made "
        f"({', '.join(found)}). {remedy if limits else divergence_advice(stage, 0)}"
    )
