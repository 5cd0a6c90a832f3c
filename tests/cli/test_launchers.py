"""Sweeps whose jobs are processes of their own: a crash, a signal, a requeue, the launchers."""

import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from omegaconf import OmegaConf

from lightning_rlhf.cli import sweep
from lightning_rlhf.cli.sweep import STOP, STOPPED, run_job, stoppable, stopped_by
from lightning_rlhf.parallel.world import SRUN

from .conftest import Workplace


def job(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> str | None:
    """What a job returns whose process is a shell script."""
    program = folder / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(sweep, "own_configs", list)
    cfg = OmegaConf.create(
        {"outputs": str(folder), "run": "r", "model": {"name": "m"}, "stage": "ppo", "job": "a=1"}
    )
    return run_job(cfg, ["stage=ppo", "job='a=1'"])


def test_the_job_gets_its_folder_and_its_output_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job(tmp_path, monkeypatch, 'echo "$@"; env | grep IN_SWEEP >&2') is None
    written = (tmp_path / "r/m/a=1/ppo.log").read_text()
    assert written == "-m lightning_rlhf stage=ppo job='a=1'\nLIGHTNING_RLHF_IN_SWEEP=1\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [("kill -9 $$", "ended by SIGKILL"),
     ('mkdir -p {0}; echo "no model" > {0}/failed.txt; exit 1', "no model")],
)  # fmt: skip
def test_a_job_that_dies_is_marked_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    folder = tmp_path / "r/m/a=1/ppo"
    failure = job(tmp_path, monkeypatch, script.format(folder))
    assert failure is not None
    assert failure.startswith(f"{why}; its output is in {tmp_path}/r/m/a=1/ppo.log")
    assert (folder / "failed.txt").read_text().startswith(why)


BUSY = """trap 'sleep 0.2; touch {0}/saved; exit 143' TERM
touch {0}/begun
while :; do sleep 0.05; done"""
"""A run that writes its checkpoint after a SIGTERM."""


def when_begun(folder: Path, act: Callable[..., object], *arguments: object) -> None:
    def wait() -> None:
        while not (folder / "begun").exists():
            time.sleep(0.02)
        act(*arguments)

    threading.Thread(target=wait, daemon=True).start()


def test_a_job_is_requeued_after_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """submitit requeues in its handler of SIGUSR2, and leaves the process."""

    def requeue(signum: int, frame: FrameType | None) -> None:
        sys.exit("saved" if (tmp_path / "saved").exists() else "lost")

    before = signal.signal(signal.SIGUSR2, requeue)
    try:
        when_begun(tmp_path, os.kill, os.getpid(), signal.SIGUSR2)
        with pytest.raises(SystemExit, match="saved"):
            job(tmp_path, monkeypatch, BUSY.format(tmp_path))
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("is_sweeper", [True, False])
def test_a_signal_to_a_launcher_s_process_ends_its_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sweeper: bool
) -> None:
    """After its checkpoint. After one to the command no further job begins."""
    with stoppable(is_apart=False):
        monkeypatch.setattr(sweep, "is_sweeper", lambda: is_sweeper)
        when_begun(tmp_path, os.kill, os.getpid(), signal.SIGTERM)
        assert job(tmp_path, monkeypatch, BUSY.format(tmp_path)) == STOPPED
        assert (tmp_path / "saved").exists()
        assert stopped_by() == (signal.SIGTERM if is_sweeper else None)
        (tmp_path / "begun").unlink()
        assert job(tmp_path, monkeypatch, "exit 0") == (STOPPED if is_sweeper else None)


def test_a_signal_to_the_command_ends_the_job_of_a_launcher_s_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stoppable(is_apart=True):
        when_begun(tmp_path, Path(os.environ[STOP], str(int(signal.SIGTERM))).touch)
        assert job(tmp_path, monkeypatch, BUSY.format(tmp_path)) == STOPPED
        assert (tmp_path / "saved").exists()


@pytest.mark.matrix
def test_a_job_in_a_process_of_a_launcher_fails(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused there, as its folder holds a file of the user, and the table says so."""
    monkeypatch.setenv("COLUMNS", "400")
    file = workplace.stage("seed=1") / "ppo" / "mine"
    file.parent.mkdir(parents=True)
    file.touch()
    words = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "stage=ppo", "seed=choice(1)")
    outcome = workplace.sweep(*words)
    assert outcome.status == 1
    assert [*file.parent.iterdir()] == [file]
    assert re.search("failed: .*seed=1: .* holds mine and no conf", outcome.out)


SLURM = {
    # Starts the job at once, with the variables of Slurm.
    "sbatch": r"""
cp "$1" "$0.script"
SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=here \
    bash "$1" > /dev/null 2>&1 &
echo Submitted batch job 7
""",
    "srun": """
while [[ $1 == -* || $1 == *.out || $1 == *.err ]]; do shift; done
SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=1 exec "$@"
""",
    "sacct": "echo 'JobID|State|NodeList'",
}
"""Programs of Slurm that run the jobs on this machine."""


@pytest.mark.matrix
def test_slurm_jobs_have_a_gpu_for_each_process(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way of a job: submitted, started by srun, refused, and its result read."""
    for name, script in SLURM.items():
        program = tmp_path / "slurm" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'slurm'}:{os.environ['PATH']}")
    folder = workplace.stage("kl_coef=0.1") / "ppo"
    folder.mkdir(parents=True)
    (folder / "mine").touch()
    outcome = workplace.sweep(
        "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "trainer.devices=2",
        "stage=ppo", "ppo.kl_coef=choice(0.1)",
    )  # fmt: skip
    assert outcome.status == 1
    asked = (tmp_path / "slurm" / "sbatch.script").read_text()
    for option in (
        "gpus-per-node=2", "nodes=1", "ntasks-per-node=1", "partition=gpu", "signal=USR2@180",
        "time=720",
    ):  # fmt: skip
        assert f"#SBATCH --{option}\n" in asked
    assert " holds mine and no config.json" in outcome.out


def test_a_sweep_in_several_processes_is_refused_and_leaves_nothing(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(SRUN, ("0", "2", "0"), strict=True):
        monkeypatch.setenv(name, value)
    error = workplace.sweep("stage=ppo", "seed=1,2").error
    assert "srun has started 2 processes, but a sweep starts the processes of its jobs" in error
    assert not workplace.outputs.exists()
