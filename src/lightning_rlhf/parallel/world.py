"""The place of this process among those of a run, from the environment. Imports no slow library."""

from __future__ import annotations

import os
from collections.abc import Mapping
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

    @property
    def is_first(self) -> bool:
        """Return whether this process writes the files and the output of the run."""
        return self.rank == 0


IN_LAUNCHER = "LIGHTNING_RLHF_IN_LAUNCHER"
"""Environment variable set for the processes of a run that this program starts: number of the
process that starts them, which prints the signals that it receives, and how they ended."""
TORCHRUN = "RANK", "WORLD_SIZE", "LOCAL_RANK"
SRUN = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
"""Environment variables of rank, size and local rank, set by torchrun and by Slurm's srun."""


def world(environment: Mapping[str, str] = os.environ) -> World:
    """Return the place of this process, as torchrun or srun tells it; else that of a single one."""
    for launcher, names in (("torchrun", TORCHRUN), ("srun", SRUN)):
        if all(environment.get(name, "").isdigit() for name in names):
            rank, size, local_rank = (int(environment[name]) for name in names)
            if size > 1:
                return World(rank, size, local_rank, launcher)
    return World()
