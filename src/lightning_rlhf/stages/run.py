"""Runs one stage, in one of several processes if need be, from settings to its `final/` folder."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType

import lightning as L
import torch

from lightning_rlhf.core.errors import (
    ProcessEndedError,
    RLHFError,
    TrainingError,
    naming_own_keys,
    require,
)
from lightning_rlhf.parallel.replicas import Replicas, join_group, leave_message, message_left
from lightning_rlhf.parallel.world import IN_LAUNCHER, world
from lightning_rlhf.stages.accelerator import (
    TIMEOUT,
    check_accelerator,
    check_devices,
    cluster,
    denormals_flushed,
    device_of,
    keep_large_blocks,
    print_device,
)
from lightning_rlhf.stages.advice import advise
from lightning_rlhf.stages.console import quiet_libraries
from lightning_rlhf.stages.folder.folders import FINAL, folder_of
from lightning_rlhf.stages.folder.resume import held
from lightning_rlhf.stages.preflight.preflight import preflight
from lightning_rlhf.stages.prepare import Training
from lightning_rlhf.stages.stage import Settings

THREADS = torch.get_num_threads()
"""Torch's default number of threads, before any run of this process changed it."""


def run_in_folder(settings: Settings) -> Path:
    """Run the stage in a folder that is already locked; return the path of `final/`."""
    quiet_libraries()
    check_accelerator(settings)
    with computing(settings), advising(settings):
        print_device(settings)
        final = settings.definition.run(settings, settings.config)
        is_folder = isinstance(final, Path) and final.is_dir()
        require(is_folder, f"what the function `run` of stage={settings.stage} returned", final,
                "the path of the folder that it wrote")  # fmt: skip
        return final


def check_in_memory(settings: Settings) -> None:
    """Prepare the stage and check it as a run does before its first update; write nothing."""
    quiet_libraries()
    check_accelerator(settings)
    prepare = settings.definition.prepare
    assert prepare is not None
    with computing(settings), advising(settings):
        print_device(settings)
        training: Training = prepare(settings, settings.config)
        preflight(training.ready, training.module, training.data)


@contextmanager
def advising(settings: Settings) -> Iterator[None]:
    """Add advice to a TrainingError raised inside; errors name the keys of the stage's section."""
    try:
        with naming_own_keys(settings.stage, {f.name for f in fields(settings.definition.config)}):
            yield
    except TrainingError as error:
        advise(error, settings.stage)
        raise


@contextmanager
def computing(settings: Settings) -> Iterator[None]:
    """Set the process up to round and draw random numbers as a run of these settings does."""
    trainer = settings.trainer
    sharing = trainer.devices if world().size > 1 else 1  # processes on this machine
    torch.set_num_threads(trainer.threads or max(1, THREADS // sharing))
    torch.set_float32_matmul_precision(trainer.matmul_precision)
    if trainer.accelerator == "cpu":
        keep_large_blocks()
    L.seed_everything(settings.seed, verbose=False)
    with denormals_flushed():
        yield


def run_replica(settings: Settings, begin: Callable[[Settings], Settings | None]) -> Path:
    """Run the stage as one of several processes; return the path of `final/`.

    begin: function that checks the run's folder and returns the settings to run with, None where
        the run has finished. It is called in the first process alone.
    """
    replicas, folder = join(settings), folder_of(settings)
    with errors_of_all(replicas), held(settings, folder) if replicas.is_first else nullcontext():
        decided = replicas.first(lambda: resume_of(begin(settings)))
        if decided is None:
            return folder / FINAL
        resume, overwrite = decided
        return run_in_folder(replace(settings, resume=resume, overwrite=overwrite))


@contextmanager
def errors_of_all(replicas: Replicas) -> Iterator[None]:
    """Let the first process raise the errors of all; the others end without a word.

    Where a process has ended without a message, the program that started it says so. That program
    ends the processes that are left: the first one raises the error nevertheless.
    """
    if replicas.is_first:
        signal.signal(signal.SIGTERM, raise_message)
    try:
        yield
    except ProcessEndedError as error:
        message = message_left() if replicas.is_first else None
        is_printed = not replicas.is_first or IN_LAUNCHER in os.environ
        if message is None and is_printed:
            sys.exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise RLHFError(message or str(error)) from error
    except RLHFError as error:
        if replicas.is_first:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise
        leave_message(f"process {replicas.rank}: {error}")
        sys.exit(1)


def raise_message(signum: int, frame: FrameType | None) -> None:
    """Raise the error that another process has left; without one, end as SIGTERM does.

    Where the command was killed that would say why, this process does.
    """
    if (message := message_left()) is not None:
        raise RLHFError(message)
    signal.signal(signum, signal.SIG_DFL)
    if IN_LAUNCHER in os.environ and os.environ[IN_LAUNCHER] != str(os.getppid()):
        os.write(2, b"error: the command that started this process has ended\n")
    os.kill(os.getpid(), signum)


def resume_of(settings: Settings | None) -> tuple[bool | str, bool] | None:
    """Return the values of `resume` and `overwrite`; None without settings."""
    return None if settings is None else (settings.resume, settings.overwrite)


def join(settings: Settings) -> Replicas:
    """Join the process group of the run; return its replicas.

    Raises ConfigError where this machine has too few GPUs.
    """
    place, environment = world(), cluster(world())
    address = f"tcp://{environment.main_address}:{environment.main_port}"
    check_devices(settings)
    device, backend = device_of(settings), "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    method = "env://" if place.launcher == "torchrun" else address
    return join_group(place, device, backend, method, TIMEOUT)
