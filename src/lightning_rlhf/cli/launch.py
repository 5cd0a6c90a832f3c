"""A job in processes of its own: those of a stage on several devices, and that of a sweep's job."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lightning_rlhf.callbacks.stop import SAID, SIGNALS, Stop, Stopped
from lightning_rlhf.cli.arguments import key_of
from lightning_rlhf.cli.recipe import override_value, own_configs
from lightning_rlhf.cli.sweep import end_early, is_sweeper, job_place, mark_failed, stopped_by
from lightning_rlhf.core.errors import ConfigError, PrintedError, RLHFError, first_line
from lightning_rlhf.parallel.world import IN_LAUNCHER
from lightning_rlhf.runs.folders import (
    FAILED,
    FINAL,
    folder_of,
    refuse_foreign_files,
)
from lightning_rlhf.runs.process import IN_RECIPE, IN_SWEEP, STOPPED, run_command
from lightning_rlhf.runs.stage import Settings

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

    check_devices(settings, settings.trainer.devices)
    words = [word for word in overrides if key_of(word) not in DECIDED]
    words += [f"resume={settings.resume}".lower(), f"overwrite={settings.overwrite}".lower()]
    words += [] if settings.job is None else [f"job={override_value(settings.job)}"]
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
