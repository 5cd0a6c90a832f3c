"""A job that Hydra has composed: its processes, its stage or recipe, and how to go on."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import uuid
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf.callbacks.checkpoint_files import numbered, step_named
from lightning_rlhf.callbacks.stop import SAID, SIGNALS, Stop, Stopped
from lightning_rlhf.cli.arguments import (
    composition_error,
    key_of,
    parse_overrides,
    program_name,
    refuse_other_stages,
    refuse_processes,
    stage_of,
    without_secrets,
)
from lightning_rlhf.cli.recipe import (
    own_configs,
    quoted,
    read_recipe,
    recipe_folder,
    run_program,
    run_recipe,
)
from lightning_rlhf.cli.sweep import end_early, is_sweeper, job_place, mark_failed, stopped_by
from lightning_rlhf.core.errors import ConfigError, PrintedError, RLHFError, first_line
from lightning_rlhf.io.console import print_line
from lightning_rlhf.parallel.world import IN_LAUNCHER, world
from lightning_rlhf.runs.folders import (
    CHECKPOINTS,
    FAILED,
    FINAL,
    folder_of,
    is_unbegun,
    is_used,
    refuse_foreign_files,
    state_of,
)
from lightning_rlhf.runs.process import IN_RECIPE, IN_SWEEP, STOPPED, run_command
from lightning_rlhf.runs.settings import folder_names, plain, read_settings
from lightning_rlhf.runs.stage import AUTO, STAGES, Settings, stage_names

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


DECIDED = ("job", "resume", "overwrite")
"""Keys whose values were decided in this process."""
HERE = "127.0.0.1"
"""Address at which the processes meet: the look-up of a name, such as localhost, may fail."""
MEET_S = 30
"""Seconds after which an attempt to meet has failed; the launcher makes two."""
SHUTDOWN_S = 3600
"""Seconds after a signal in which the processes finish their step and write a checkpoint."""


def run_processes(settings: Settings, overrides: Sequence[str]) -> None:
    """Run the stage in `trainer.devices` processes on this machine, and wait for them.

    overrides: overrides of the job.

    Raises: Stopped where a signal ended it, RLHFError where a process was killed, PrintedError
        where one failed with a message, and SystemExit where one failed otherwise.
    """
    if settings.trainer.num_nodes > 1:
        raise ConfigError(
            f"trainer.num_nodes is {settings.trainer.num_nodes}, but this command starts processes "
            "on this machine alone; allowed: on each machine torchrun "
            f"--nnodes={settings.trainer.num_nodes} --nproc-per-node={settings.trainer.devices} "
            "--rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -m lightning_rlhf "
            f"{shlex.join([*own_configs(), *overrides])}, or srun (docs/scaling.md)"
        )
    from lightning_rlhf.runs.accelerator import check_devices  # which imports torch

    check_devices(settings)
    words = [word for word in overrides if key_of(word) not in DECIDED]
    words += [f"resume={settings.resume}".lower(), f"overwrite={settings.overwrite}".lower()]
    words += [] if settings.job is None else [f"job={quoted(settings.job)}"]
    trains, folder = settings.definition.trains, folder_of(settings)
    failures = launch(
        settings.trainer.devices, ["-m", "lightning_rlhf", *own_configs(), *words],
        SAID if trains else "",
    )  # fmt: skip
    statuses = {rank: failure.exitcode for rank, failure in failures.items()}
    if (killed := killed_process(statuses)) is not None:
        rank, number = killed
        goes_on = (
            f"resume=auto goes on in {folder}" if trains else "the same command starts it over"
        )
        raise RLHFError(
            f"process {rank} of the run was ended by {signal.Signals(number).name}, and the "
            f"others with it; {goes_on}"
        )
    for failure in failures.values():
        if "timestamp" in failure.error_file_data:  # which `print_error` has left
            raise PrintedError(failure.message)
    if failures:
        sys.exit(max(statuses.values()))
    assert (folder / FINAL).is_dir()


def killed_process(failures: Mapping[int, int]) -> tuple[int, int] | None:
    """Return rank and signal of the process that a signal ended; None where none was.

    The launcher sends SIGTERM to those that are left when another one has ended: it counts only if
    no process ended in another way.

    failures: rank -> exit status, or below 0 a signal's number.
    """
    killed = [(rank, -status) for rank, status in sorted(failures.items()) if status < 0]
    others = [one for one in killed if one[1] != signal.SIGTERM]
    if not others and len(killed) < len(failures):
        return None
    return next(iter(others or killed), None)


def launch(processes: int, command: Sequence[str], said: str) -> dict[int, ProcessFailure]:
    """Run `python command` in several processes; return rank -> failure of those that failed.

    An exit status below 0 is a signal's number.
    said: message to print at the first signal, with a place for its name.

    Raises: Stopped where a signal came to this process, after the processes have ended, and
        RLHFError where they do not meet.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    stop = Stop(said)

    def receive(signum: int, frame: FrameType | None) -> None:
        is_second = stop.signal is not None
        stop.receive(signum, frame)  # a second one ends this process, and the others with it
        if not is_second:
            raise SignalException(f"received signal {signum}", signal.Signals(signum))

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{HERE}:0",
        rdzv_configs={"read_timeout": MEET_S, "join_timeout": MEET_S},
        local_addr=HERE,
        max_restarts=0,
        shutdown_timeout=SHUTDOWN_S,
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    logging.disable(logging.CRITICAL)  # the launcher's own report of a failed process
    before = dict(os.environ)
    handlers = {number: signal.signal(number, receive) for number in heard}
    os.environ |= {IN_LAUNCHER: str(os.getpid()), IN_RECIPE: "processes"}
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        return dict(error.failures)
    except (RendezvousError, DistError) as error:
        reason = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise RLHFError(
            f"the processes of the run do not meet at {HERE} ({first_line(reason)}); allowed: "
            "a machine on which a program can connect to that address, or trainer.devices=1"
        ) from error
    except SignalException as error:
        raise Stopped(error.sigval) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(before)
        logging.disable(logging.NOTSET)
    return {}


def run_job(cfg: DictConfig, overrides: Sequence[str]) -> str | None:
    """Run the job of a sweep in a process of its own, which may crash without ending the others.

    Return why it failed, or STOPPED after a signal to the command or this process; else None. Its
    output goes to `<stage>.log` beside its folder, as jobs may run at the same time.
    """
    if stopped_by() is not None:
        return STOPPED
    _, folder = job_place(cfg)
    refuse_foreign_files(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    written, log = folder / FAILED, folder.with_name(f"{folder.name}.log")
    written.unlink(missing_ok=True)
    command = [sys.executable, "-m", "lightning_rlhf", *own_configs(), *overrides]
    try:
        with log.open("ab") as output, checkpoint_before_requeue():
            status = run_command(command, {IN_SWEEP: "1"}, output, stopped_by)
    except Stopped as stop:
        if is_sweeper():  # a signal to another process ends its job alone
            end_early(stop.signum)
        return STOPPED
    if status == 0:
        return None
    if stopped_by() is not None:
        return STOPPED
    if status > 0 and written.is_file():
        return f"{written.read_text().strip()}; its output is in {log}"
    why = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return mark_failed(cfg, f"{why}; its output is in {log}")


@contextmanager
def checkpoint_before_requeue() -> Iterator[None]:
    """End the job after a checkpoint before submitit requeues it in its handler of SIGUSR2.

    The signal becomes a SIGTERM to this process, which `run_command` passes on to the job.
    """
    requeue: Any = signal.getsignal(signal.SIGUSR2)
    if not callable(requeue):
        yield
        return
    came: list[int] = []

    def end_job(*received: Any) -> None:
        came.append(received[0])
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR2, end_job)
    try:
        yield
    except Stopped:
        if not came:
            raise
    finally:
        signal.signal(signal.SIGUSR2, requeue)
    if came:
        requeue(came[0], None)


NEXT = {
    "sft": ("rm", "preferences"),
    "rm": ("ppo", "prompts"),
    "ppo": ("eval_policy", "prompts"),
}
"""Stage -> the one that follows it, and the data that this one reads."""
ONCE = ("stage", "final", "resume", "overwrite", "preflight", "record")
"""Keys of a command that are not those of the next one."""


def next_command(settings: Settings, overrides: Sequence[str]) -> str:
    """Return the command that goes on from a finished stage that hands over a model."""
    words = ["chat", str(folder_of(settings) / FINAL)]
    if settings.stage in NEXT:
        given = [o for o in parse_overrides(overrides) if o.key_or_group not in ONCE]
        kept = [str(o.input_line) for o in given if stage_of(o, STAGES) is None]
        following, data = NEXT[settings.stage]
        words = [*own_configs(), f"stage={following}", *kept]
        if getattr(settings.data, data).train is None:
            words.append(f"data.{data}.train=FILE.jsonl")
    return without_secrets(f"{program_name()} {shlex.join(words)}", overrides)


def resume_hint(cfg: DictConfig, in_sweep: bool) -> list[str]:
    """Return how to resume a stopped run; an empty list where there is nothing to resume."""
    if in_sweep or cfg.recipe is not None:
        return [f"the same command{', without overwrite=true,' * bool(cfg.overwrite)} goes on"]
    try:
        settings = read_settings(cfg)
        folder = folder_of(settings)
        if not is_used(folder) or (folder / FINAL).is_dir():
            return []
        if settings.resume == AUTO:
            return ["the same command goes on"]
        if saved := numbered(folder / CHECKPOINTS):
            return [f"resume=auto goes on from the checkpoint of step {step_named(saved[-1])}"]
        if is_unbegun(folder) or not settings.definition.trains:
            return ["the same command starts it over"]
    except RLHFError:
        return []
    every = f"{settings.stage}.checkpoint_every={settings.config.checkpoint_every}"
    return [f"it has no checkpoint yet ({every}), resume=auto starts it over"]


def stage_settings(cfg: DictConfig, in_sweep: bool) -> Settings:
    """Return the checked settings of a stage. Raises ConfigError naming a key or an override."""
    overrides = given_overrides()
    unresolved: Any = OmegaConf.to_container(cfg)
    stage = OmegaConf.select(cfg, "stage", throw_on_resolution_failure=False)
    names = stage_names(unresolved)
    if not in_sweep and stage in names:
        refuse_other_stages(stage, overrides, names)
    return read_settings(cfg)


def given_overrides() -> list[str]:
    """Return the overrides of the job as typed; indexing the list resolves an interpolation."""
    overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task)
    return overrides


def execute(cfg: DictConfig, in_sweep: bool) -> None:
    """Run the recipe, or the stage; a repeated sweep runs only the jobs that are not finished."""
    overrides = given_overrides()
    if OmegaConf.select(cfg, "recipe", throw_on_resolution_failure=False) is not None:
        if OmegaConf.select(cfg, "stage", throw_on_resolution_failure=False) is not None:
            raise ConfigError(f"recipe={cfg.recipe} runs its own stages; leave stage= out, or it")
        refuse_processes("a recipe")
        folder_names(plain(cfg))
        folder = recipe_folder(cfg.recipe)
        recipe = read_recipe(folder)
        try:
            if recipe.program is None:
                run_recipe(recipe, cfg, overrides)
            else:
                run_program(recipe, folder, cfg, overrides)
        except (HydraException, OmegaConfBaseException) as error:  # the recipe's own overrides
            given = Namespace(overrides=overrides, multirun=False, config_name=None)
            raise ConfigError(
                f"{folder / 'recipe.yaml'}: {composition_error(error, given)}"
            ) from error
        return
    settings = stage_settings(cfg, in_sweep)
    from lightning_rlhf.stages import fit  # torch and Lightning take ten seconds of a processor

    if settings.preflight == "plan":
        fit.plan(settings)
        return
    if settings.preflight == "only":
        fit.check(settings)
        return
    if in_sweep and not settings.overwrite:
        state = state_of(settings)
        if state == "done":
            fit.complete(settings)
            return
        resume = (settings.resume or AUTO) if state == "cut off" else False
        settings = replace(settings, resume=resume, overwrite=state == "outdated")
    trainer, definition = settings.trainer, settings.definition
    # Without processes on the other machines, a stage that does not train computes in this one.
    is_startable = definition.trains or (definition.divides and trainer.num_nodes == 1)
    if trainer.processes > 1 and world().size == 1 and is_startable:
        run_processes(settings, overrides)
    elif definition.trains:
        fit.fit(settings)
    else:
        fit.measure(settings)
    is_alone = not in_sweep and IN_RECIPE not in os.environ
    if is_alone and definition.hands_over == "model":
        print_line(f"next: {next_command(settings, overrides)}")
