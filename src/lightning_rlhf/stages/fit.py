"""Runs a stage: the same start, training, check and export for all of them."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_rlhf.callbacks import checkpoints, compute, files, metrics, progress, stopping
from lightning_rlhf.callbacks.loggers import close_loggers
from lightning_rlhf.callbacks.stop import Stop, deferred_signals
from lightning_rlhf.core import errors
from lightning_rlhf.core.config import StageConfig
from lightning_rlhf.core.errors import CheckpointError, ConfigError, TrainingError, counted
from lightning_rlhf.evaluation import select
from lightning_rlhf.evaluation.run_report import leave_report
from lightning_rlhf.io import console
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.parallel import sharding
from lightning_rlhf.parallel.replicas import ONE
from lightning_rlhf.parallel.world import world
from lightning_rlhf.report.curves import panel_for_each
from lightning_rlhf.report.figures import draw_plots
from lightning_rlhf.rollout import server
from lightning_rlhf.runs import accelerator, folders, measured, objects
from lightning_rlhf.runs.resume import decide, locked_run, origin
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.stage import Settings, Stage
from lightning_rlhf.stages import memory_plan, preflight


def advise(error: TrainingError, stage: str = "ppo") -> TrainingError:
    """Return the error with advice from its facts; existing advice is kept.

    stage: name of the section whose keys the advice names.
    """
    if error.advice is not None:
        return error
    match error:
        case errors.NotFiniteError(rewards_overflow=True):
            error.advice = (
                "The rewards were infinite, or their squares were, before the first update of the "
                f"iteration: the reward is too large. {stage}.score_clip bounds it, and so does "
                "the clip of a reward's component. Start over (overwrite=true or job=NAME) with one"
            )
        case errors.NotFiniteError():
            error.advice = checkpoints.divergence_advice(error.stage, error.made)
        case errors.LogitsError(iterations=0):
            error.advice = "No update was made yet: so is the model that the run starts from"
        case errors.LogitsError(iterations=int(), nonfinite=count):
            last = f"The last {counted(count, 'update')} before it had a loss or gradient that is "
            last = f"{last}not finite and made no change. " if count else ""
            error.advice = (
                f"{last}A smaller {stage}.lr may hold the model: start over (overwrite=true or "
                "job=NAME) with one, since a resumed run keeps its numbers"
            )
        case errors.LogitsError():
            error.advice = "Where it was trained until here, a smaller learning rate may hold it"
    if isinstance(error, errors.NotFiniteError) and error.batch is not None:
        error.advice = f"{error.advice}. {error.batch}"
    return error


THREADS = torch.get_num_threads()
"""Torch's default number of threads, before any run of this process changed it."""


def fit(settings: Settings) -> Path:
    """Run a stage to its end in its locked folder; return the path of `final/`.

    To be called in each of the processes that torchrun or srun started.
    Raises TrainingError where the model has diverged, or where no update was made.
    """
    with started(settings) as begun:
        if begun is None:
            return folders.folder_of(settings) / folders.FINAL
        stage, run = begun
        if not stage.trains:
            final = stage.measure(run)
            is_folder = isinstance(final, Path) and final.is_dir()
            what = f"what `measure` of stage={stage.name} returned"
            errors.require(is_folder, what, final, "the path of the folder that it wrote")
            return final
        module, data, callbacks = build(stage, run)
        steps, replicas = len(data.schedule), run.replicas
        if run.checkpoint is not None:
            check_state(run.checkpoint, module, data)
        preflight.preflight(run, module, data, resumed=run.checkpoint is not None)
        replicas.first(run.create)
        config, stop = run.settings.config, Stop()
        config = replace(config, val_every=config.validation_interval(steps))
        # A logger that does nothing in the other processes: callbacks may refuse to run without.
        loggers: list[Logger] = run.open_loggers() if replicas.is_first else [DummyLogger()]
        goal, gain = select.goal_of(run.settings), select.goal_of(run.settings, "stop")
        saver = checkpoints.Checkpoints(
            run.folder / folders.CHECKPOINTS, config, origin(run.settings), stop, goal, replicas
        )
        rule = stopping.EarlyStop(stage.name, config.stop, next(iter(gain), None))
        trainer = trainer_of(run, stop, config, loggers, callbacks, [rule, saver])
        exit_code = 1
        try:
            with deferred_signals(stop), objects.misconfigured():
                trainer.fit(module, datamodule=data, ckpt_path=run.checkpoint, weights_only=True)
                if replicas.is_first or sharding.trains():
                    select.check_learned(stage.name, run.folder, trainer, module)
                # The last checkpoint is written before the evaluation of the same step.
                if saver.measured != progress.trained(trainer):
                    trainer.validate(module, datamodule=data, verbose=False)
            if sharding.models:  # which the first process goes on to compute with
                module.to(run.device)
            last = progress.trained(trainer)
            if replicas.is_first or sharding.trains():  # else the others end
                chosen = select.choose(run.folder, saver, module, steps, last, rule.reason)
            if not replicas.is_first:
                sharding.arrive()  # as the first process does once it has written final/
                sys.exit()
            stage.report(run, module, loggers, progress.position(trainer, module))
            exit_code = 0
        finally:
            if exit_code and replicas.size > 1:
                # Another process may have ended before: the launcher then ends those that are left.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with console.Working("closing the loggers"):
                close_loggers(loggers, exit_code)
            if exit_code and replicas.is_first:
                leave_report(run.folder, stage)
        if chosen is None:
            chosen = {n: x for n, x in progress.latest(trainer).items() if n.startswith("eval/")}
        print_curves(run, stage, saver)
        metrics = select.measured_before(run.folder) | stage.summarise(run, module, chosen)
        rows = files.read_rows(run.folder / folders.METRICS).values()
        last_row = next((row for row in reversed(rows) if compute.PEAK in row), None)
        if last_row is not None:  # else the run had ended before its compute was counted
            computed = {n: x for n, x in last_row.items() if n.startswith(compute.PREFIX)}
            console.print_detail(compute.compute_line([computed]))
            metrics |= computed
        return stage.finish(run, module, metrics)


@contextmanager
def started(settings: Settings) -> Iterator[tuple[Stage, Run] | None]:
    """Within the block, run a stage in its locked folder, in one of several processes if need be.

    Yields the stage and its run; None for a run that has finished and is to be resumed, whose page
    is written where a kill came before it.
    """
    accelerator.check_processes(settings, world())
    is_alone = world().size == 1
    replicas = ONE if is_alone else accelerator.join(settings)
    lock = locked_run(settings, folders.folder_of(settings)) if replicas.is_first else nullcontext()
    with nullcontext() if is_alone else accelerator.errors_of_all(replicas), lock:
        start = replicas.first(lambda: decide(settings))
        if start is None:
            replicas.first(lambda: complete(settings))
            yield None
            return
        resume, overwrite, checkpoint = start
        settings = replace(settings, resume=resume, overwrite=overwrite)
        with entered(settings, checkpoint=checkpoint) as entry:
            yield entry
        sharding.leave()


def build(stage: Stage, run: Run) -> tuple[Any, Any, list[Callback]]:
    """Return the module of a stage before its first step, its data, and its callbacks.

    What the configuration alone tells of the step that becomes `final/` is checked first.
    """
    select.check_final(run.settings, getattr(run.settings.config, "iterations", None))
    module, data, callbacks = stage.build(run)
    select.check_final(run.settings, len(data.schedule))
    module.optimizer_class = run.optimizer
    memory_plan.choose_microbatch(run, module, data)
    return module, data, callbacks


def check(settings: Settings) -> None:
    """Build the stage, check it before its first update, and print what was found.

    No file is written, and the folder of the run may hold a run already.
    Raises an RLHFError where the stage cannot start or a check fails.
    """
    require_trained(settings.definition, "checked")
    with entered(settings) as (stage, run):
        module, data, _ = build(stage, run)
        preflight.preflight(run, module, data)


def export(settings: Settings, given: folders.Export) -> Path:
    """Write the model of a checkpoint as a folder like `final/`; return its path."""
    with entered(settings, export=given) as (stage, run):
        module = stage.restore(run)
        select.load_weights(module, given.checkpoint, given.origin)
        stage.report(run, module, [], given.ending.step)
        return stage.finish(run, module, given.metrics)


def require_trained(stage: Stage, done: str) -> None:
    """Raise ConfigError unless the stage trains. done: what is to be done with it, a participle."""
    if not stage.trains:
        raise ConfigError(
            f"stage={stage.name} cannot be {done}: it does not train; allowed: sft, rm, ppo, dpo, "
            "or a stage of your own that trains"
        )


def complete(settings: Settings) -> None:
    """Write the page of a finished run that was killed before it had one, and delete what is left
    half written."""
    folder = folders.folder_of(settings)
    page, final = folder / folders.PAGE, folder / folders.FINAL
    is_written = page.is_file() and page.stat().st_mtime_ns >= final.stat().st_mtime_ns
    if not is_written or (folder / folders.FAILED).exists():
        folders.delete_unfinished(folder)
        leave_report(folder, settings.definition)


@contextmanager
def entered(settings: Settings, **given: Any) -> Iterator[tuple[Stage, Run]]:
    """Within the block, compute as a run of these settings does; yield the stage and its run.

    Errors name the keys of the stage's section, and those of a training come with advice.
    given: as for `Run.of`.
    """
    console.details = settings.debug
    accelerator.quiet_libraries()
    accelerator.check_devices(settings)
    set_up(settings)
    names = {field.name for field in fields(settings.config)}
    try:
        with accelerator.denormals_flushed(), errors.naming_own_keys(settings.stage, names):
            accelerator.print_device(settings)
            yield copy(settings.definition), Run.of(settings, **given)
    except TrainingError as error:
        advise(error, settings.stage)
        raise
    finally:
        server.stop()


LINEAR_ATTENTION = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
"""Module -> package with kernels of linear attention; the extra `gpu` holds them."""


class KernelsLine(Callback):
    """Prints which layers are used, once the weights are on the training device, and what a model
    with linear attention lacks to be fast on CUDA."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(roles := getattr(pl_module, "roles", None), Roles):
            return
        console.print_detail(str(roles.kernels))
        config = roles.causal_lm.config
        kinds = getattr(config, "layer_types", None) or ()
        missing = [name for module, name in LINEAR_ATTENTION.items() if find_spec(module) is None]
        if roles.device.type == "cuda" and "linear_attention" in kinds and missing:
            console.print_line(
                f"{config.model_type} is slow: its linear attention is computed by a loop of "
                f"transformers without {' and '.join(missing)}; pip install 'lightning-rlhf[gpu]'",
                "yellow",
            )


def set_up(settings: Settings) -> None:
    """Set the process up to round and draw random numbers as a run of these settings does."""
    trainer = settings.trainer
    sharing = trainer.devices if world().size > 1 else 1  # processes on this machine
    torch.set_num_threads(trainer.threads or max(1, THREADS // sharing))
    torch.set_float32_matmul_precision(trainer.matmul_precision)
    if trainer.accelerator == "cpu":
        accelerator.keep_large_blocks()
    L.seed_everything(settings.seed, verbose=False)


def trainer_of(
    run: Run, stop: Stop, config: StageConfig, loggers: list[Logger], logging: list[Callback],
    ending: list[Callback],
) -> L.Trainer:  # fmt: skip
    """Return the Trainer of a stage, with its callbacks and those of the user.

    The stage's callbacks, `logging`, come first, as those of the user read the metrics that they
    log; those of `ending` come after the user's.
    """
    stage, options = run.settings.definition, run.settings.trainer.options
    # First, so that whatever the others do in a validation is done with the averaged weights.
    callbacks: list[Callback] = []
    if config.ema_decay is not None:
        callbacks.append(stopping.WeightAverage(config.ema_decay))
    # The first process alone measures and writes, and shares its metrics.
    callbacks += logging if run.replicas.is_first else []
    callbacks += [metrics.SharedMetrics(run.replicas)] if run.replicas.size > 1 else []
    callbacks += [stopping.CheckMonitors(), *run.callbacks, *ending, KernelsLine()]
    has_bar = any(isinstance(own, ProgressBar) for own in run.callbacks)
    if not has_bar and options.get("enable_progress_bar") is not False:
        callbacks.append(progress.Progress(stage.name, stage.headlines))
    if run.checkpoint is not None:
        console.print_line(f"going on from {run.checkpoint}")
    return objects.build_trainer(
        run.settings.trainer,
        run.arguments,
        stop,
        callbacks=callbacks,
        plugins=[checkpoints.WholeFiles()],
        max_epochs=1,
        val_check_interval=config.val_every,
        check_val_every_n_epoch=None,
        use_distributed_sampler=False,
        num_sanity_val_steps=-1,  # all validation data are evaluated before the first step
        logger=loggers,
        enable_checkpointing=False,
        default_root_dir=run.folder,
    )


def check_state(checkpoint: Path, module: L.LightningModule, data: Any) -> None:
    """Raise CheckpointError unless the checkpoint belongs to these parameters and data.

    Called before anything in the run's folder is written or removed; Lightning reads it again.
    """
    found = files.load_checkpoint(checkpoint)
    try:
        data.load_state_dict(found[type(data).__qualname__])
        module.on_load_checkpoint(found)
    except CheckpointError as error:
        raise CheckpointError(
            f"{checkpoint} cannot be resumed: {error}. Start over with overwrite=true"
        ) from error


def print_curves(run: Run, stage: Stage, saver: checkpoints.Checkpoints) -> None:
    """Draw the curves, and print which evaluation was the best where it beats the last one."""
    title = f"{stage.title}: {folders.run_name(run.settings)}"
    curves = measured.read_metrics(run.folder)
    panels = (stage.panels or panel_for_each)(curves)
    draw_plots(
        run.folder / "curves.png", title, [panel.measured(curves, stage.unit) for panel in panels]
    )
    if saver.config.final == "last" and saver.best not in (None, saver.last):
        console.print_line(
            f"the best evaluation was that of step {saver.best_step}: {saver.best_text()}. final/ "
            "is the last step"
        )
