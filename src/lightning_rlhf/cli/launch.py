"""Commands in processes of their own: those of a stage on several devices, and single ones."""

import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, BinaryIO

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_rlhf.callbacks.stop import MESSAGE, SIGNALS, Stop, Stopped
from lightning_rlhf.cli.arguments import key_of
from lightning_rlhf.core.errors import PrintedError, RLHFError, first_line, require
from lightning_rlhf.parallel.world import IN_LAUNCHER, end_with
from lightning_rlhf.runs import folders, stage

IN_RECIPE = "LIGHTNING_RLHF_IN_RECIPE"
"""Environment variable set for the stages of a recipe; the recipe prints the resume hint itself."""
HERE = "127.0.0.1"
"""Address at which the processes meet: the look-up of a name, such as localhost, may fail."""
MEET_S = 30
"""Seconds after which an attempt to meet has failed; the launcher makes two."""
SHUTDOWN_S = 3600
"""Seconds after a signal in which the processes finish their step and write a checkpoint."""


def override_value(text: str | None) -> str:
    """Return a text as a value in an override; null for None."""
    return "null" if text is None else "'{}'".format(text.replace("'", r"\'"))


def own_configs() -> list[str]:
    """Return the words of the command that name the user's own configurations, options first."""
    hydra = HydraConfig.get()
    sources, name = hydra.runtime.config_sources, hydra.job.config_name
    words = [f"--config-dir={s.path}" for s in sources if s.provider == "command-line"]
    words += [f"--config-name={name}"] if name != "config" else []
    given: Any = OmegaConf.to_container(hydra.overrides.hydra)
    return words + [word for word in given if key_of(word) == "hydra.searchpath"]


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: BinaryIO | None = None,
    stopped_by: Callable[[], int | None] = lambda: None,
) -> int:
    """Run a command to its end and return its exit status, below 0 where a signal ended it.

    A signal to this process is passed on, and the command is waited for. The command runs in a
    process group of its own, so that it gets Ctrl-C once, though a terminal sends it to a group.
    SIGUSR2, in whose handler submitit requeues a job, is passed on as SIGTERM; that handler is
    called when the command has ended with its checkpoint.

    output: file for what the command prints; None for the output of this process.
    stopped_by: function that is called every second; once it returns a signal, the command gets
        SIGTERM.

    Raises Stopped afterwards if a signal came.
    """
    received: list[int] = []
    passed: dict[int, int] = {signal.SIGUSR2: signal.SIGTERM}
    process: subprocess.Popen[bytes] | None = None

    def pass_on(signum: int, frame: FrameType | None = None) -> None:
        received.append(signum)
        if process is not None:
            process.send_signal(passed.get(signum, signum))

    handled = [s for s in (*SIGNALS, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    requeue: Any = signal.getsignal(signal.SIGUSR2)
    handled += [signal.SIGUSR2] if callable(requeue) else []
    before = {signum: signal.signal(signum, pass_on) for signum in handled}
    options: dict[str, Any] = {"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL}
    options |= {"process_group": 0, "preexec_fn": partial(end_with, os.getpid())}
    try:
        process = subprocess.Popen(command, env={**os.environ, **environment}, **options)
        for signum in tuple(received):  # before there was a process
            process.send_signal(passed.get(signum, signum))
        is_terminated = False
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            if not is_terminated and stopped_by() is not None:
                process.terminate()
                is_terminated = True
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if signal.SIGUSR2 in received:
        requeue(signal.SIGUSR2, None)
    if received:
        raise Stopped(received[0])
    return process.returncode


def run_processes(settings: stage.Settings, overrides: Sequence[str]) -> None:
    """Run the stage in `trainer.devices` processes on this machine, and wait for them.

    overrides: overrides of the job.

    Raises: Stopped where a signal ended it, RLHFError where a process was killed, PrintedError
        where one failed with a message, and SystemExit where one failed otherwise.
    """
    trainer, trains = settings.trainer, settings.definition.trains
    here = "1, as this command starts processes on this machine alone"
    allowed = f"{here}; or torchrun or srun on each machine (docs/scaling.md)"
    require(trainer.num_nodes == 1, "trainer.num_nodes", trainer.num_nodes, allowed)
    from lightning_rlhf.runs.accelerator import check_devices  # which imports torch

    check_devices(settings, trainer.devices)
    decided = {
        "resume": str(settings.resume).lower(),
        "overwrite": str(settings.overwrite).lower(),
        "job": override_value(settings.job),
    }
    words = [word for word in overrides if key_of(word) not in decided]
    words += [f"{key}={value}" for key, value in decided.items()]
    command = ["-m", "lightning_rlhf", *own_configs(), *words]
    failures = launch(trainer.devices, command, MESSAGE if trains else "")
    statuses = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
    killed = [rank for rank, status in statuses.items() if status < 0]
    # The launcher sends SIGTERM to those that are left when another one has ended: it counts only
    # if no process ended in another way.
    first = [rank for rank in killed if statuses[rank] != -signal.SIGTERM]
    if rank := first or killed * (len(killed) == len(failures)):
        auto = f"resume=auto goes on in {folders.folder_of(settings)}"
        raise RLHFError(
            f"process {rank[0]} of the run was ended by {signal.Signals(-statuses[rank[0]]).name}, "
            f"and the others with it; {auto if trains else 'the same command starts it over'}"
        )
    for failure in failures.values():
        if "timestamp" in failure.error_file_data:  # which `print_error` has left
            raise PrintedError(failure.message)
    if failures:
        sys.exit(max(statuses.values()))


def launch(processes: int, command: Sequence[str], message: str) -> dict[int, Any]:
    """Run `python command` in several processes.

    message: text to print at the first signal, with a place for its name.

    Returns: rank -> `ProcessFailure` of a process; an exit status below 0 is a signal's number.

    Raises: Stopped where a signal came to this process, after the processes have ended, and
        RLHFError where they do not meet.
    """
    from torch.distributed import DistError, elastic, launcher

    stop = Stop(message)
    signalled = elastic.multiprocessing.SignalException

    def receive(signum: int, frame: FrameType | None) -> None:
        is_second = stop.signal is not None
        stop.receive(signum, frame)  # a second one ends this process, and the others with it
        if not is_second:
            raise signalled(f"received signal {signum}", signal.Signals(signum))

    config = launcher.LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=uuid.uuid4().hex,
        rdzv_backend="c10d", rdzv_endpoint=f"{HERE}:0", local_addr=HERE, max_restarts=0,
        rdzv_configs={"read_timeout": MEET_S, "join_timeout": MEET_S},
        shutdown_timeout=SHUTDOWN_S, signals_to_handle="SIGHUP,SIGQUIT",
    )  # fmt: skip
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    logging.disable(logging.CRITICAL)  # the launcher's own report of a failed process
    before = dict(os.environ)
    handlers = {number: signal.signal(number, receive) for number in handled}
    os.environ |= {IN_LAUNCHER: str(os.getpid()), IN_RECIPE: "processes"}
    try:
        launcher.elastic_launch(config, sys.executable)(*command)
    except elastic.multiprocessing.errors.ChildFailedError as error:
        return dict(error.failures)
    except (elastic.rendezvous.RendezvousError, DistError) as error:
        raise RLHFError(
            f"the processes of the run do not meet at {HERE} ({first_line(error)}); allowed: a "
            "machine on which a program can connect to that address, or trainer.devices=1"
        ) from error
    except signalled as error:
        raise Stopped(error.sigval) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(before)
        logging.disable(logging.NOTSET)
    return {}
