"""The place of this process among those of a run, from the environment. Imports no slow library."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """Place of a process among all processes of a run."""

    rank: int = 0
    """Number of this process, from 0."""
    size: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Number of this process on its machine, from 0: the number of its GPU."""
    launcher: str | None = None
    """Program that started the processes: "torchrun" or "srun"; None for one process."""


IN_LAUNCHER = "LIGHTNING_RLHF_IN_LAUNCHER"
"""Environment variable set for the processes of a run that this program starts: number of the
process that starts them, which prints the signals that it receives, and how they ended."""
TORCHRUN = "RANK", "WORLD_SIZE", "LOCAL_RANK"
SRUN = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
"""Environment variables of rank, size and local rank, set by torchrun and by Slurm's srun."""
LAUNCH = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "MASTER_PORT"),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
}
"""Launcher -> environment variables that differ between two runs that it starts."""
PROCESS = "LIGHTNING_RLHF_PROCESS"
"""Environment variable that a process of a run sets itself: its number and the values of LAUNCH."""
JOB = ("MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
INHERITED = {*TORCHRUN, *SRUN, *JOB, PROCESS, IN_LAUNCHER}
"""Environment variables by which a process is known as one of a run, here or by Lightning."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: signal to send to a process when its parent ends."""


def world(environment: Mapping[str, str] = os.environ) -> World:
    """Return the place of this process, as torchrun or srun gives it; else that of a single one."""
    for launcher, names in (("torchrun", TORCHRUN), ("srun", SRUN)):
        if all(environment.get(name, "").isdigit() for name in names):
            rank, size, local_rank = (int(environment[name]) for name in names)
            if size > 1:
                return World(rank, size, local_rank, launcher)
    return World()


def leave_run(environment: MutableMapping[str, str] = os.environ) -> None:
    """Delete the variables of a run where this process is none of it, but was started by one.

    Whatever a process of a run starts, such as a command in a reward function, inherits them.
    """
    if (launcher := world(environment).launcher) is None:
        return
    launch = " ".join(environment.get(name, "") for name in LAUNCH[launcher])
    found, own = environment.get(PROCESS, ""), f"{os.getpid()} {launch}"
    if found.partition(" ")[2] != launch:  # torchrun or srun has started this process
        if found:  # within another run
            environment.pop(IN_LAUNCHER, None)
        environment[PROCESS] = found = own
    if found == own:
        return
    for name in [*environment]:
        if name in INHERITED or name.startswith("TORCHELASTIC_"):
            del environment[name]


def end_with(parent: int) -> None:
    """Request SIGTERM for when the parent ends, even if killed; works on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the request
            os.kill(os.getpid(), signal.SIGTERM)
