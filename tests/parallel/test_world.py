"""The place of a process, as the program that started it tells it."""

from __future__ import annotations

import pytest

from lightning_rlhf.parallel.world import World, world

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, World()),
        (TORCHRUN, World(3, 4, 1, "torchrun")),
        (SRUN, World(5, 8, 1, "srun")),
        (TORCHRUN | SRUN, World(3, 4, 1, "torchrun")),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, World()),
        ({"RANK": "0", "WORLD_SIZE": "2"}, World()),
        # In a batch script, outside of srun, Slurm tells the numbers of the whole job.
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, World()),
    ],
)
def test_the_place_of_a_process(environment: dict[str, str], expected: World) -> None:
    assert world(environment) == expected


def test_the_first_process() -> None:
    assert [World(rank, 2).is_first for rank in range(2)] == [True, False]
