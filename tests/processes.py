"""Work that runs in several processes, forked from the test's own."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from lightning_rlhf.parallel.replicas import Replicas, join_group
from lightning_rlhf.parallel.world import world

SECONDS = 120
"""Longest time that the processes may take."""


TORCHRUN = "RANK", "WORLD_SIZE", "LOCAL_RANK"
SRUN = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"


def forked(
    size: int, work: Callable[[], Any], folder: Path, names: tuple[str, str, str] = TORCHRUN
) -> list[Any]:
    """What `work` returned in each of `size` processes, or the exception that it raised there.

    The processes start with copies of all that this one holds, and with the environment of
    processes that torchrun or srun started.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = []
    for rank in range(size):
        place = dict(zip(names, map(str, (rank, size, rank)), strict=True))
        if names == SRUN:
            place |= {"SLURM_NTASKS": str(size), "SLURM_NTASKS_PER_NODE": str(size)}
            place |= {"SLURM_JOB_ID": "1", "SLURM_NODEID": "0"}
        file = folder / f"{rank}_of_{size}.pt"
        file.unlink(missing_ok=True)
        arguments = address | place, work, file
        children.append((context.Process(target=child, args=arguments, daemon=True), file))
    for process, _ in children:
        process.start()
    for process, _ in children:
        process.join(SECONDS)
        process.kill()
    return [torch.load(file, weights_only=False) for _, file in children]


def child(environment: dict[str, str], work: Callable[[], Any], file: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= environment
    try:
        found = work()
        if distributed.is_initialized():
            distributed.barrier()
    except BaseException as error:
        error.add_note(traceback.format_exc())
        found = error
    torch.save(found, file)
    os._exit(0)


def replicated(size: int, work: Callable[[Replicas], Any], folder: Path) -> list[Any]:
    """What `work` returned in each process of a process group, or the exception it raised there."""

    def joined() -> Any:
        cpu, limit = torch.device("cpu"), timedelta(seconds=SECONDS)
        return work(join_group(world(), cpu, "gloo", "env://", limit))

    return forked(size, joined, folder)
