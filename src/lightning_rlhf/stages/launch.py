"""The steps that all stages share: prepare, fit, hand over."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_rlhf.callbacks.checkpoint_files import load_checkpoint
from lightning_rlhf.callbacks.checkpoints import Checkpoints, WholeFiles, trained
from lightning_rlhf.callbacks.compute import PEAK, PREFIX, compute_line
from lightning_rlhf.callbacks.contract import CheckMonitors, position
from lightning_rlhf.callbacks.loggers import RunIdentity, build_loggers, close_loggers, read_rows
from lightning_rlhf.callbacks.metrics import SharedMetrics
from lightning_rlhf.callbacks.progress import Progress
from lightning_rlhf.callbacks.stop import Stop, deferred_signals
from lightning_rlhf.callbacks.stopping import EarlyStop, WeightAverage
from lightning_rlhf.core.config import StageConfig
from lightning_rlhf.core.errors import CheckpointError, counted
from lightning_rlhf.data.batches import StageData
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.report.figures import draw_curves
from lightning_rlhf.stages.accelerator import linear_attention_line
from lightning_rlhf.stages.final import check_final, goal_of, stop_metric
from lightning_rlhf.stages.folder.folders import CHECKPOINTS, METRICS, claim, run_name
from lightning_rlhf.stages.folder.resume import origin, resume_point
from lightning_rlhf.stages.objects import build_trainer, misconfigured
from lightning_rlhf.stages.preflight.preflight import preflight
from lightning_rlhf.stages.prepare import Prepared
from lightning_rlhf.stages.run_report import leave_report
from lightning_rlhf.stages.select import check_learned, choose
from lightning_rlhf.stages.stage import Settings

AtEnd = Callable[[Sequence[Logger], int], None]
"""Function of the loggers and the last step, called before the loggers close."""


class KernelsLine(Callback):
    """Prints which layers are used, once the weights are on the training device."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(roles := getattr(pl_module, "roles", None), Roles):
            print_line(str(roles.kernels))
            if (line := linear_attention_line(roles)) is not None:
                print_line(line, "yellow")


def fit(
    ready: Prepared,
    module: L.LightningModule,
    data: StageData,
    callbacks: list[Callback],
    at_end: AtEnd | None = None,
) -> dict[str, float]:
    """Train over the whole schedule, validate at the end, draw the curves; return the last metrics.

    Raises TrainingError where the model has diverged, or where no update was made.
    """
    settings, stage, steps = ready.settings, ready.settings.definition, len(data.schedule)
    replicas = ready.replicas
    check_final(settings, steps)
    resume_from = replicas.first(lambda: resume_point(settings))
    if resume_from is not None:
        check_state(resume_from, module, data)
    preflight(ready, module, data, resumed=resume_from is not None)
    replicas.first(lambda: claim(settings, ready.parents))
    config = rhythm(settings, steps)
    # In the other processes a logger that does nothing, as callbacks may refuse to run without one.
    loggers: list[Logger] = [DummyLogger()]
    if replicas.is_first:
        loggers = build_loggers(settings.logger, ready.folder, identity(settings)) + ready.loggers
    stop = Stop()
    saver = Checkpoints(
        ready.folder / CHECKPOINTS, config, origin(settings), stop, goal_of(settings), replicas
    )
    rule = EarlyStop(settings.stage, config.stop, stop_metric(settings))
    # First, so that whatever the others do in a validation is done with the averaged weights.
    average = [] if config.ema_decay is None else [WeightAverage(config.ema_decay)]
    # The first process alone measures and writes, and shares its metrics.
    logging = callbacks if replicas.is_first else []
    trainer = trainer_of(
        ready, stop, config.val_every, loggers, [*average, *logging], [rule, saver]
    )
    if resume_from is not None:
        print_line(f"going on from {resume_from}")
    exit_code = 1
    try:
        with deferred_signals(stop), misconfigured():
            train(ready, trainer, module, data, saver, resume_from)
        if not replicas.is_first:
            sys.exit()
        chosen = choose(ready.folder, saver, module, steps, trained(trainer), rule.reason)
        if at_end is not None:
            at_end(loggers, position(trainer, module))
        exit_code = 0
    finally:
        if exit_code and replicas.size > 1:
            # Another process may have ended before, and the launcher then ends those that are left.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with Working("closing the loggers"):
            close_loggers(loggers, exit_code)
        if exit_code and replicas.is_first:
            leave_report(ready.folder, stage)
    title = f"{stage.title}: {run_name(settings)}"
    print_line(f"curves: {draw_curves(ready.folder, title, stage.unit, stage.panels)}")
    print_best(saver)
    if chosen is not None:
        return chosen
    return {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("eval/")}


def print_compute(folder: Path) -> dict[str, float]:
    """Print and return the totals of what a run has computed, from its last row of them."""
    rows = [row for row in read_rows(folder / METRICS).values() if PEAK in row]
    if not rows:  # a run that had ended before its compute was counted
        return {}
    computed = {name: float(cell) for name, cell in rows[-1].items() if name.startswith(PREFIX)}
    print_line(compute_line(computed))
    return computed


def rhythm(settings: Settings, steps: int) -> StageConfig:
    """Return the section of the stage, with `val_every` as a run of so many steps has it."""
    config: StageConfig = settings.config
    val_every = config.validation_interval(steps)
    if val_every != config.val_every:
        print_line(
            f"validating every {counted(val_every, 'step')}, a tenth of the {steps} of the run: "
            f"{settings.stage}.val_every is {config.val_every}, more than it has"
        )
    return replace(config, val_every=val_every)


def trainer_of(
    ready: Prepared,
    stop: Stop,
    val_every: int,
    loggers: list[Logger],
    callbacks: Sequence[Callback],
    ending: Sequence[Callback],
) -> L.Trainer:
    """Return the Trainer of a stage, with its callbacks and those of the user.

    The stage's callbacks come first, as those of the user read the metrics that they log; those of
    `ending` come after the user's.
    """
    stage, options = ready.settings.definition, ready.settings.trainer.options
    shared = [SharedMetrics(ready.replicas)] if ready.replicas.size > 1 else []
    is_quiet = "enable_progress_bar" in options and options["enable_progress_bar"] is False
    has_bar = is_quiet or any(isinstance(own, ProgressBar) for own in ready.callbacks)
    return build_trainer(
        ready.settings.trainer,
        ready.arguments,
        stop,
        callbacks=[
            *callbacks,
            *shared,
            CheckMonitors(),
            *ready.callbacks,
            *ending,
            KernelsLine(),
            *([] if has_bar else [Progress(stage.name, stage.headlines)]),
        ],
        plugins=[WholeFiles()],
        max_epochs=1,
        val_check_interval=val_every,
        check_val_every_n_epoch=None,
        use_distributed_sampler=False,
        num_sanity_val_steps=-1 if stage.validates_first else 0,
        logger=loggers,
        enable_checkpointing=False,
        default_root_dir=ready.folder,
    )


def train(
    ready: Prepared,
    trainer: L.Trainer,
    module: L.LightningModule,
    data: StageData,
    saver: Checkpoints,
    resume_from: Path | None,
) -> None:
    """Train, check that the model has learned, and evaluate the last step if it is not yet."""
    trainer.fit(module, datamodule=data, ckpt_path=resume_from, weights_only=True)
    if ready.replicas.is_first:
        check_learned(ready.settings.stage, ready.folder, trainer, module)
    # The last checkpoint is written before the evaluation of the same step.
    if saver.measured != trained(trainer):
        trainer.validate(module, datamodule=data, verbose=False)


def print_best(saver: Checkpoints) -> None:
    """Print which evaluation was the best, unless it was the last one."""
    if saver.config.final == "last" and saver.best_step not in (None, saver.evaluated):
        print_line(
            f"the best evaluation was that of step {saver.best_step}: {saver.best_text()}. final/ "
            "is the last step"
        )


def identity(settings: Settings) -> RunIdentity:
    """Return what a dashboard shows of the run."""
    return RunIdentity(
        name=run_name(settings),
        run=settings.run,
        model=settings.model.name,
        job=settings.job,
        stage=settings.stage,
        config=settings.tree,
    )


def check_state(checkpoint: Path, module: L.LightningModule, data: StageData) -> None:
    """Raise CheckpointError unless the checkpoint belongs to these parameters and data.

    Called before anything in the run's folder is written or removed; Lightning reads it again.
    """
    found = load_checkpoint(checkpoint)
    try:
        data.load_state_dict(found[type(data).__qualname__])
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error
    try:
        module.on_load_checkpoint(found)
    except CheckpointError as error:
        raise CheckpointError(
            f"{checkpoint} cannot be resumed: {error}. Start over with overwrite=true"
        ) from error
