from __future__ import annotations

import csv
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from lightning_rlhf.callbacks.metrics_file import MetricsFile
from lightning_rlhf.core.errors import StorageError


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_step_has_one_row_and_what_was_not_measured_an_empty_cell(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.log_metrics({"reward_mean": 1.0}, step=1)
    file.log_metrics({"reward_mean": 2.0}, step=2)
    file.log_metrics({"eval/reward_mean": 3.0}, step=2)
    file.log_metrics({"reward_mean": 4.0}, step=3)
    assert read(tmp_path / "metrics.csv") == [
        {"step": "1", "reward_mean": "1.0", "eval/reward_mean": ""},
        {"step": "2", "reward_mean": "2.0", "eval/reward_mean": "3.0"},
        {"step": "3", "reward_mean": "4.0", "eval/reward_mean": ""},
    ]


def test_every_row_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in range(3):
        file.log_metrics({"reward_mean": float(step)}, step=step)
        assert len(read(tmp_path / "metrics.csv")) == step + 1


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(tmp_path: Path) -> None:
    before = MetricsFile(tmp_path)
    for step in (1, 2, 3):
        before.log_metrics({"reward_mean": float(step), "entropy": 0.5}, step=step)
    after = MetricsFile(tmp_path)
    after.rewind(2)
    after.log_metrics({"reward_mean": 30.0, "entropy": 0.5}, step=3)
    rows = read(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["reward_mean"] for row in rows] == ["1.0", "2.0", "30.0"]


def test_a_row_that_was_cut_off_is_no_row(tmp_path: Path) -> None:
    """ "1" is what was written of step 12, and must not be taken for step 1."""
    before = MetricsFile(tmp_path)
    before.log_metrics({"reward_mean": 1.0}, step=1)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("1")
    after = MetricsFile(tmp_path)
    after.rewind(1)
    assert read(tmp_path / "metrics.csv") == [{"step": "1", "reward_mean": "1.0"}]


def test_columns_follow_the_table_of_metrics(tmp_path: Path) -> None:
    metrics = {"eval/judge/b": 1.0, "eval/judge/a": 1.0, "time/rollout_s": 1.0, "reward_mean": 1.0}
    MetricsFile(tmp_path).log_metrics(metrics, step=1)
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0]
    assert header == "step,reward_mean,time/rollout_s,eval/judge/a,eval/judge/b"


def test_a_row_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step"):
        MetricsFile(tmp_path).log_metrics({"reward_mean": 1.0})


def test_a_file_that_does_not_fit_leaves_the_one_before(
    tmp_path: Path, largest_file: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "metrics.csv"
    file = MetricsFile(tmp_path)
    file.log_metrics({"reward_mean": 1.0}, step=1)
    told = rf"^{path} was not written: File too large\. It needs .* and .* are free now"
    with pytest.raises(StorageError, match=told), largest_file(20):
        file.log_metrics({"eval/reward_mean": 2.0}, step=1)
    assert read(path) == [{"step": "1", "reward_mean": "1.0"}]
    assert list(tmp_path.iterdir()) == [path]
