from __future__ import annotations

import csv
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from lightning_rlhf.callbacks.loggers import MetricsFile
from lightning_rlhf.core.errors import CheckpointError, StorageError


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
    told = rf"^{path} was not written: File too large\. It needs .* may have 0\.0 kB \(ulimit -f\)"
    with pytest.raises(StorageError, match=told), largest_file(20):
        file.log_metrics({"eval/reward_mean": 2.0}, step=1)
    assert read(path) == [{"step": "1", "reward_mean": "1.0"}]
    assert list(tmp_path.iterdir()) == [path]


def test_a_row_that_finds_no_room_names_the_file(
    tmp_path: Path, largest_file: Callable[[int], AbstractContextManager[None]]
) -> None:
    """It is written behind the others, and a part of it is there."""
    path = tmp_path / "metrics.csv"
    file = MetricsFile(tmp_path)
    file.log_metrics({"entropy": 1.0}, step=1)
    assert path.stat().st_size == 14 + 7  # "step,entropy" and "1,1.0" with their ends of lines
    told = rf"^{path} was not written: File too large; .* may have 0\.0 kB \(ulimit -f\)\. Raise"
    with pytest.raises(StorageError, match=told), largest_file(23):
        file.log_metrics({"entropy": 2.0}, step=2)
    after = MetricsFile(tmp_path)
    after.rewind(1)
    after.log_metrics({"entropy": 3.0}, step=2)
    assert [row["entropy"] for row in read(path)] == ["1.0", "3.0"]


@pytest.mark.parametrize("line", [
    "two,1.0", "2,high", "2,1.0,3.0", "2", "", "-1,1.0", "1,1.0",
])  # fmt: skip
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(f"step,entropy\n1,1.0\n{line}\n")
    with pytest.raises(CheckpointError) as caught:
        MetricsFile(tmp_path)
    assert str(caught.value) == (
        f"{path}, line 3, is damaged: found {line!r}; allowed: a step larger than those "
        "before it, and 1 numbers or empty cells. Delete that line, or mend it"
    )


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"step,entropy\n1,\xff\n")
    with pytest.raises(CheckpointError, match=rf"^{path} is damaged: byte 16 is no UTF-8"):
        MetricsFile(tmp_path)
