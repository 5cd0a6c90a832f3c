"""The device that a run computes on, its settings, libraries, and strategy of several processes."""

import ctypes
import logging
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from transformers.utils import logging as transformers_logging

from lightning_rlhf.core import errors
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.io.console import print_line
from lightning_rlhf.parallel import replicas as group
from lightning_rlhf.parallel.world import IN_LAUNCHER, World, world
from lightning_rlhf.runs.console import shown_warning
from lightning_rlhf.runs.stage import Settings

CUDA = torch.version.cuda
BUILT = f"torch {torch.__version__} is built {f'for CUDA {CUDA}' if CUDA else 'without CUDA'}"
"""Version of CUDA for which the installed torch is built, alone and as a sentence."""


def device_of(settings: Settings) -> torch.device:
    """Return the device that this process of the run computes on."""
    if settings.trainer.accelerator == "cpu":
        return torch.device("cpu")
    place = world()
    return torch.device(f"cuda:{place.local_rank}" if place.size > 1 else "cuda")


def check_devices(settings: Settings, needed: int = 1) -> None:
    """Raise ConfigError where the run asks for GPUs and torch cannot compute on so many here.

    needed: number of processes of the run on this machine. Where it is 1, torch tries its GPU.
    """
    if settings.trainer.accelerator != "gpu":
        return
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if needed > found:
        fewer = f"trainer.devices of at most {found}, or " if found else ""
        raise errors.ConfigError(
            f"trainer.accelerator is 'gpu' and trainer.devices is {settings.trainer.devices}, but "
            f"torch finds {errors.counted(found, 'CUDA GPU')} on this machine ({BUILT}); allowed: "
            f"{fewer}trainer=cpu"
        )
    try:
        if needed == 1:  # a sum needs a kernel for this GPU, which not every build of torch has
            torch.ones(2, device="cuda").sum().item()
    except RuntimeError as error:
        raise errors.ConfigError(
            "trainer.accelerator is 'gpu', but torch cannot compute on the GPU it finds "
            f"({errors.first_line(error)}); allowed: trainer=cpu"
        ) from error


def print_device(settings: Settings) -> None:
    """Print the device and the precision of the run, and why a GPU is not used if there is one."""
    name, note = "the CPU", ""
    if settings.trainer.accelerator == "gpu":
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "the GPU"
    elif CUDA is None and shutil.which("nvidia-smi"):
        note = f"; {BUILT} and cannot use the GPU"
    size, threads = world().size, ""
    if name == "the CPU":
        threads = f" of {errors.counted(torch.get_num_threads(), 'thread')} each"
    processes = f" in {size} processes{threads}" if size > 1 else ""
    print_line(f"computing on {name}{processes}, {settings.trainer.precision}{note}")


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
CACHES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
"""Variables of the environment from which oneDNN, and torch's layer above it, read how many shapes
of products they keep, when they first compute one: 0.3 MB a shape each, of 1,024 by default."""
SHAPES = 256


@cache
def keep_large_blocks() -> None:
    """Reuse the memory of freed tensors, where the C library is glibc.

    By default glibc takes every block above 32 MB from the system and returns it when freed, and
    the system clears each page again: with a vocabulary of 32,768 that is a third of an update on
    a CPU. Here the process keeps the memory that it once needed. Done once per process, before
    memory is in use.

    oneDNN keeps at most SHAPES compiled products, unless the user's environment says how many.
    """
    for name in CACHES:
        os.environ.setdefault(name, str(SHAPES))
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if (mallopt := getattr(libc, "mallopt", None)) is None:
        return
    mallopt(_TRIM_THRESHOLD, -1)
    if not mallopt(_MMAP_THRESHOLD, 1 << 30):
        mallopt(_MMAP_THRESHOLD, 1 << 25)  # older releases take no more


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Treat numbers below 1e-38 as 0 in this thread, where the processor supports it.

    Decays of linear attention and tails of a softmax reach them, and arithmetic with them is many
    times slower: without this it takes a third of an update of a small Qwen3.5.
    """
    before = bool(torch.tensor(1e-30) * 1e-9 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


TIMEOUT = timedelta(days=1)
"""Longest time that a process waits for the others, which may judge, score over HTTP or write
files. A process that ends is noticed at once."""


class ReplicaStrategy(DDPStrategy):
    """Strategy for processes whose modules sum the gradients themselves.

    Its collective operations raise ProcessEndedError where another process has ended.
    """

    def __init__(self) -> None:
        super().__init__(cluster_environment=cluster(), timeout=TIMEOUT)

    reduce = group.collective()(DDPStrategy.reduce)
    broadcast = group.collective()(DDPStrategy.broadcast)
    all_gather = group.collective()(DDPStrategy.all_gather)

    def configure_ddp(self) -> None:
        """Leave the module unwrapped."""

    def setup(self, trainer: Any) -> None:
        """Set up for a fit or an evaluation, before which Lightning would broadcast the weights."""
        module: Any = self.model
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        module._ddp_params_and_buffers_to_ignore = names  # as torch's DDP names it
        super().setup(trainer)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for no process, since the first one alone writes checkpoints."""


def cluster() -> SLURMEnvironment | TorchElasticEnvironment:
    """Return Lightning's description of the program that started the processes."""
    is_slurm = world().launcher == "srun"
    return SLURMEnvironment(auto_requeue=False) if is_slurm else TorchElasticEnvironment()


def check_processes(settings: Settings, place: World) -> None:
    """Raise ConfigError unless the run has as many processes as its configuration says.

    place: place of this process among those of the run.
    """
    trainer, stage, definition = settings.trainer, settings.stage, settings.definition
    config, size = settings.config, place.size
    if size == 1 and not definition.trains:
        return  # it can compute in one process, whatever trainer.devices is
    started = f"{place.launcher or 'this command'} has started "
    started += "one process" if size == 1 else f"{size} processes"
    if size != trainer.processes:
        raise errors.ConfigError(
            f"trainer.devices is {trainer.devices} and trainer.num_nodes is {trainer.num_nodes}, "
            f"but {started}; allowed: equal numbers"
        )
    if not (size == 1 or definition.trains or definition.divides):
        way = f"stage={stage} computes in one; allowed: one process"
        raise errors.ConfigError(f"{started}, but {way}")
    if isinstance(config, PPOConfig) and config.prompts_per_iteration < size:
        raise errors.ConfigError(
            f"{stage}.rollout_batch_size is {config.rollout_batch_size}, which is "
            f"{config.prompts_per_iteration} prompts for {size} processes; allowed: at least "
            f"{size * config.samples_per_prompt}"
        )


def join(settings: Settings) -> group.Replicas:
    """Join the process group of the run; return its replicas.

    Raises ConfigError where this machine has too few GPUs.
    """
    place, environment, backend = world(), cluster(), "gloo"
    check_devices(settings, settings.trainer.devices)
    device = device_of(settings)
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    address = f"tcp://{environment.main_address}:{environment.main_port}"
    method = "env://" if place.launcher == "torchrun" else address
    return group.join_group(place, device, backend, method, TIMEOUT)


@contextmanager
def errors_of_all(replicas: group.Replicas) -> Iterator[None]:
    """Let the first process raise the errors of all; the others end without a word.

    Where a process has ended without a message, the program that started it says so. That program
    ends the processes that are left: the first one raises the error nevertheless.
    """
    if replicas.is_first:
        signal.signal(signal.SIGTERM, raise_message)
    try:
        yield
    except errors.ProcessEndedError as error:
        message = group.message_left() if replicas.is_first else None
        if message is None and (not replicas.is_first or IN_LAUNCHER in os.environ):
            sys.exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise errors.RLHFError(message or str(error)) from error
    except errors.RLHFError as error:
        if replicas.is_first:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise
        group.leave_message(f"process {replicas.rank}: {error}")
        sys.exit(1)


def raise_message(signum: int, frame: FrameType | None) -> None:
    """Raise the error that another process has left; without one, end as SIGTERM does.

    Where the command was killed that would say why, this process does.
    """
    if (message := group.message_left()) is not None:
        raise errors.RLHFError(message)
    signal.signal(signum, signal.SIG_DFL)
    if IN_LAUNCHER in os.environ and os.environ[IN_LAUNCHER] != str(os.getppid()):
        os.write(2, b"error: the command that started this process has ended\n")
    os.kill(os.getpid(), signum)


NOISY_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.accelerators.cuda",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
)
NOISY_WARNINGS = (
    ".*does not have many workers.*",  # the data is in memory
    ".*in eval mode at the start of training.*",  # on purpose: no dropout
    ".*check_val_every_n_epoch.*",  # one epoch is the whole run
    ".*dataloader is not resumable.*",  # the schedule starts where the checkpoint ends
    ".*smaller than the logging interval.*",
    ".*sync_dist=True.*",  # every process logs the same numbers
    ".*callbacks used to create the checkpoint.*",
    ".*`lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`.*",  # the first update was not made
    ".*LeafSpec.*",
    ".*is_gradient_checkpointing.*",
)


def quiet_libraries() -> None:
    """Silence messages of libraries that appear at every start and need no action."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for pattern in NOISY_WARNINGS:
        warnings.filterwarnings("ignore", pattern)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # kernels for CPUs that are optional
    warnings.formatwarning = shown_warning
