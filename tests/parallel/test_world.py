"""The place of a process, from the environment of the program that started it."""

import os

import pytest

from lightning_rlhf.parallel.world import IN_LAUNCHER, PROCESS, World, leave_run, world

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, World()),
        (TORCHRUN, World(3, 4, 1, "torchrun")),
        (SRUN, World(5, 8, 1, "srun")),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, World()),
        # In a batch script, outside of srun, Slurm tells the numbers of the whole job.
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, World()),
    ],
)
def test_the_place_of_a_process(environment: dict[str, str], expected: World) -> None:
    assert world(environment) == expected


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_what_a_process_of_a_run_starts_is_none(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a reward function may start this command; it gets the variables of its parent."""
    own = {"TORCHELASTIC_RUN_ID": "a", "MASTER_PORT": "1", "SLURM_JOB_ID": "7", IN_LAUNCHER: "9"}
    environment = {"HOME": "/home", **variables, **own}
    place = world(environment)
    for _ in range(2):  # nothing changes where it is called once more
        leave_run(environment)
        assert world(environment) == place
    environment["MASTER_ADDR"] = "localhost"  # by Lightning
    monkeypatch.setattr(os, "getpid", lambda: -1)
    again = {**environment, **variables, "TORCHELASTIC_RUN_ID": "b", "SLURM_STEP_ID": "3"}
    leave_run(environment)
    assert {*environment} - {"LOCAL_WORLD_SIZE"} == {"HOME", "SLURM_JOB_ID"}
    assert world(environment) == World()
    leave_run(again)  # torchrun or srun, started within the run, starts processes of another
    assert world(again) == place
    assert again[PROCESS].startswith("-1 ")
    assert IN_LAUNCHER not in again
