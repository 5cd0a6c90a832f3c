"""The end of a sweep: exit status, the folder of its results, and whose metrics are read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from lightning_rlhf.cli.job_result import JobResult, result_of
from lightning_rlhf.cli.sweep import job_folder, job_stage
from lightning_rlhf.cli.sweep_page import is_own_run, jobs_table
from lightning_rlhf.cli.sweep_progress import SweepProgress
from lightning_rlhf.cli.sweep_results import SweepResults
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.stages import compare


def end(results: SweepResults) -> object:
    """The exit status of the sweep."""
    try:
        results.show()
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.mark.parametrize("error", [ValueError("a fault"), CheckpointError("a damaged file")])
def test_a_page_that_is_not_written_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(compare, "compare_runs", fail)
    run = tmp_path / "ppo"
    run.mkdir()
    (run / "config.json").write_text("{}")
    results = SweepResults(tmp_path)
    results.write(0, JobResult(overrides=["seed=1"], status="done", folder=str(run), stage="ppo"))
    assert end(results) == 1
    assert "error: no comparison: " in capsys.readouterr().err


def test_a_job_that_a_signal_ended_is_not_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `scancel` ends one job of a cluster; the others are not stopped."""
    results = SweepResults(tmp_path)
    results.write(0, JobResult(overrides=["seed=1"], status="stopped", failure="stopped"))
    results.write(1, JobResult(overrides=["seed=2"], status="done"))
    assert end(results) == 128 + signal.SIGTERM
    assert "stopped; the same command goes on" in capsys.readouterr().out


def test_results_of_a_sweep_that_was_killed_are_deleted(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    host = socket.gethostname()
    names = [f".sweep-{host}-{ended.pid}-a", f".sweep-{host}-{os.getpid()}-b", ".sweep-other-1-c"]
    for name in names:
        (tmp_path / name).mkdir()
    SweepResults(tmp_path).delete()
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:]}


@pytest.mark.parametrize(
    ("recipe", "job", "folder", "stage"),
    [
        ("quickstart", "seed=1", "seed=1/ppo", "ppo"),
        ("dpo", None, "eval_policy", "eval_policy"),
        ("rounds", "seed=1", "seed=1/round2/eval_policy", "eval_policy"),
        ("bandit", "seed=1", "seed=1/ppo", "ppo"),
        ("unknown", "seed=1", "seed=1/ppo", "ppo"),
    ],
)
def test_a_recipe_is_judged_by_its_last_step(
    recipe: str, job: str | None, folder: str, stage: str
) -> None:
    sections = {name: {} for name in ("ppo", "eval_policy")}
    cfg = OmegaConf.create(
        {"outputs": "o", "run": "r", "model": {"name": "m"}, "stage": None, "recipe": recipe,
         "job": job, "stages": [*sections], **sections}
    )  # fmt: skip
    assert job_folder(cfg) == Path("o/r/m") / folder
    assert job_stage(cfg).name == stage


def test_a_job_without_a_folder_keeps_its_reason() -> None:
    cfg = OmegaConf.create({"outputs": None, "stage": "ppo"})
    found = JobReturn(overrides=["outputs=null"], cfg=cfg, status=JobStatus.COMPLETED)
    found.return_value = "outputs is None; allowed: a folder"
    result = result_of(found)
    assert (result.status, result.failure) == ("failed", "outputs is None; allowed: a folder")


def test_a_line_for_each_job_that_begins_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None for those of an earlier command, and none twice."""
    results = SweepResults(tmp_path)
    progress = SweepProgress(results, ["ppo.kl_coef"])
    words = ["stage=ppo", "ppo.kl_coef=0.1"]
    results.write(0, JobResult(overrides=words, status="done", folder="r/a/ppo"))
    results.start(1, words)  # its folder is not known yet
    progress.print_new()
    assert capsys.readouterr().out == ""
    results.start(1, words, "r/b/ppo")
    progress.print_new()
    progress.print_new()
    assert capsys.readouterr().out == "#1 begins: ppo.kl_coef=0.1; its output is in r/b/ppo.log\n"
    metrics = {"eval/reward_mean": 0.5, "eval/loss": 1.0}
    done = JobResult(overrides=words, status="done", folder="r/b/ppo", metrics=metrics,
                     summary=["eval/reward_mean"])  # fmt: skip
    results.write_own(1, done)
    results.write_own(2, JobResult(overrides=words, status="failed", failure="no; see r/c/ppo.log"))
    progress.print_new()
    progress.print_new()
    assert capsys.readouterr().out.splitlines() == [
        "#1 ended: ppo.kl_coef=0.1; reward_mean 0.500; its output is in r/b/ppo.log",
        "#2 failed: ppo.kl_coef=0.1; no; see r/c/ppo.log",
    ]


def test_the_trials_of_a_study_are_in_the_order_of_its_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Off a terminal no line of the table is broken, however long."""
    results = SweepResults(tmp_path)
    results.goal = "eval/loss", "min"
    for number, (status, loss) in enumerate([("done", 2.0), ("pruned", 0.5), ("done", 1.0)]):
        words = [f"data.sft={'x' * 200}{number}", f"seed={number}"]
        metrics = {"eval/loss": loss}
        results.write(
            number, JobResult(overrides=words, status=status, metrics=metrics, summary=[*metrics])
        )
    assert end(results) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "seed=" in line]
    assert [line.split("seed=")[1][0] for line in lines] == ["2", "0", "1"]


def test_the_jobs_on_the_page_name_the_best_one() -> None:
    words = ["stage=ppo", "ppo.kl_coef=0.1"], ["stage=ppo", "ppo.kl_coef=-1"]
    done = JobResult(overrides=words[0], status="done", metrics={"eval/reward_mean": 0.5})
    failed = JobResult(overrides=words[1], status="failed", failure="ppo.kl_coef is -1")
    goal = "eval/reward_mean", "max"
    found = jobs_table([done, failed], goal)
    assert found.rows == [
        ["ppo.kl_coef=0.1", "done", "", ""],
        ["ppo.kl_coef=-1", "failed", "ppo.kl_coef is -1", ""],
    ]
    assert found.note == "Highest eval/reward_mean: 0.5, ppo.kl_coef=0.1."
    assert jobs_table([done], goal).heading == ["job", "status"]


def test_a_finished_run_in_the_folder_of_a_failed_job_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    failed = JobResult(overrides=[], status="failed")
    assert is_own_run(failed, tmp_path)
    (tmp_path / "final").mkdir()
    assert not is_own_run(failed, tmp_path)
    assert is_own_run(JobResult(overrides=[], status="done"), tmp_path)
