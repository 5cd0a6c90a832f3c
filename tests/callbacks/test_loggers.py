"""metrics.csv, TensorBoard and W&B, which may be away at the start, or end within a run."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from lightning.pytorch import Callback
from matplotlib.image import imsave
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.errors import AuthenticationError, CommError

from lightning_rlhf.callbacks.diagnosis import Diagnosis, History, rule
from lightning_rlhf.callbacks.evaluation import Samples
from lightning_rlhf.callbacks.files import LoggerConfig, logger_config
from lightning_rlhf.callbacks.loggers import (
    MetricsFile,
    RunTensorBoard,
    build_loggers,
    close_loggers,
    fitted,
    log_pictures,
)
from lightning_rlhf.callbacks.metrics import PPOMetrics
from lightning_rlhf.core.errors import CheckpointError, ConfigError, StorageError
from lightning_rlhf.core.metrics import HEADLINES

from .conftest import FakePPO, Fit

CONF = Path(__file__).parents[2] / "conf" / "logger"
ABOUT: dict[str, Any] = {
    "name": "lr/tiny/seed-1/ppo", "group": "lr", "job_type": "ppo",
    "tags": ["ppo", "tiny", "seed-1"], "config": {"seed": {"a": 1}},
}  # fmt: skip
Limit = Callable[[int], AbstractContextManager[None]]


def configured(kind: str, **changes: Any) -> LoggerConfig:
    """The configuration in conf/, with changes."""
    loaded: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{kind}.yaml"))
    return logger_config(loaded | changes)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for folder in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder))


# metrics.csv


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_step_has_one_row_and_what_was_not_measured_an_empty_cell(tmp_path: Path) -> None:
    """Each is there as soon as it is logged."""
    file, path = MetricsFile(tmp_path), tmp_path / "metrics.csv"
    for count, (step, name) in enumerate([(1, "entropy"), (2, "entropy"), (2, "eval/kl")], start=1):
        file.log_metrics({name: float(count)}, step=step)
        assert [row["step"] for row in read(path)] == ["1", "2"][: min(count, 2)]
    assert read(path) == [
        {"step": "1", "entropy": "1.0", "eval/kl": ""},
        {"step": "2", "entropy": "2.0", "eval/kl": "3.0"},
    ]
    with pytest.raises(ValueError, match="step"):
        file.log_metrics({"entropy": 1.0})


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(tmp_path: Path) -> None:
    """A row that was cut off is none: "1" is what was written of step 12."""
    path = tmp_path / "metrics.csv"
    for step in (1, 2, 3):
        MetricsFile(tmp_path).log_metrics({"entropy": float(step)}, step=step)
    with path.open("a") as file:
        file.write("1")
    after = MetricsFile(tmp_path)
    after.rewind(2)
    after.log_metrics({"entropy": 30.0}, step=3)
    assert [(row["step"], row["entropy"]) for row in read(path)] == [
        ("1", "1.0"), ("2", "2.0"), ("3", "30.0"),
    ]  # fmt: skip


def test_a_row_that_finds_no_room_names_the_file(tmp_path: Path, largest_file: Limit) -> None:
    path, file = tmp_path / "metrics.csv", MetricsFile(tmp_path)
    file.log_metrics({"entropy": 1.0}, step=1)
    assert path.stat().st_size == 14 + 7  # "step,entropy" and "1,1.0" with their ends of lines
    message = rf"^{path} was not written: File too large; .* may have 0\.0 kB \(ulimit -f\)\. Raise"
    with pytest.raises(StorageError, match=message), largest_file(23):
        file.log_metrics({"entropy": 2.0}, step=2)


@pytest.mark.parametrize(
    ("content", "number"),
    [
        ("step,a,a\n1,2,3\n", 1),
        ("a,step\n1,2\n", 1),
        ("step,a\n1,1.0\ntwo,1.0\n", 3),
        ("step,a\n1,1.0\n2\n", 3),
        ("step,a\n1,1.0\n1,1.0\n", 3),
        ("step,a\n1,1.0\n\n2,high\n", 4),  # an empty line is no row, and is counted
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, content: str, number: int) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(content)
    start = re.escape(content.splitlines()[number - 1][:60])
    with pytest.raises(
        CheckpointError, match=rf"^{path}, line {number}, is damaged: found '{start}'"
    ):
        MetricsFile(tmp_path)


# TensorBoard


def test_tensorboard_has_the_curves_the_samples_and_no_later_steps_after_a_rewind(
    fit: Fit, tmp_path: Path
) -> None:
    samples = Samples(tmp_path, 2, 1, 50)
    loggers = build_loggers(configured("tensorboard"), tmp_path, ABOUT)
    fit(FakePPO(), [PPOMetrics(), samples], loggers, batches=4)
    resumed = RunTensorBoard(tmp_path)
    resumed.rewind(2)
    resumed.log_metrics({"reward_mean": 99.0}, step=3)
    resumed.finalize("success")

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward_mean")]
    assert rewards == [(1, 1.5), (2, 2.5), (3, 99.0)]
    text = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "train question 1 [b]? | t1 t2 t3 |" in text
    assert (tmp_path / "metrics.csv").exists()


# W&B


@pytest.mark.parametrize(
    ("mode", "variable", "key", "expected"),
    [
        ("auto", None, None, "offline"),
        ("auto", None, "netrc", "online"),
        ("auto", None, "variable", "online"),
        ("offline", None, "variable", "offline"),
        ("online", "disabled", None, "disabled"),
        ("online", None, None, None),  # refused before anything starts
    ],
)
def test_wandb_is_online_only_with_a_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str, variable: str | None,
    key: str | None, expected: str | None,
) -> None:  # fmt: skip
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    if key == "variable":
        monkeypatch.setenv("WANDB_API_KEY", "secret")
    elif key == "netrc":
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    if expected is None:
        with pytest.raises(ConfigError, match=r"W&B is to be online .*hold no key.*wandb login"):
            configured("wandb", mode=mode)
    else:
        assert configured("wandb", mode=mode).start_mode == expected  # type: ignore[attr-defined]


@rule(when="in the second iteration", cause="a cause", remedy="a remedy")
def second(history: History) -> str | None:
    return "2 iterations" if len(history.rows) == 2 else None


def test_wandb_offline_keeps_curves_samples_and_identity(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loggers = build_loggers(configured("wandb"), tmp_path, ABOUT)
    said = capsys.readouterr().out
    assert said.startswith("W&B: offline, as WANDB_API_KEY and netrc hold no key; upload later")
    assert said.count("\n") == 1

    samples = Samples(tmp_path, 1, 2, 50)
    history = History(SimpleNamespace(), tmp_path)  # type: ignore[arg-type]
    diagnosis = Diagnosis(history, rules=[second])
    fit(FakePPO(), [PPOMetrics(), diagnosis, samples], loggers, batches=2)
    close_loggers(loggers, exit_code=0)
    found = records(tmp_path)
    (alert,) = (record["alert"] for record in found if record["type"] == "alert")
    assert (alert["title"], alert["level"]) == ("second", "WARN")
    assert alert["text"] == "in the second iteration (2 iterations): a cause. a remedy"
    run = next(r["run"] for r in found if r["type"] == "run")
    assert run["run_id"] == (tmp_path / "wandb_id.txt").read_text()
    assert run["display_name"] == "lr/tiny/seed-1/ppo"
    assert run["tags"] == ["ppo", "tiny", "seed-1"]
    assert run["run_group"] == "lr"
    assert run["config"]["update"]["seed"] == {"a": 1}
    history = history_of(found)
    assert set(HEADLINES) <= {key for h in history for key in h}
    curve = [(h["iteration"], h["reward_mean"]) for h in history if "reward_mean" in h]
    assert curve == [(1, 1.5), (2, 2.5)]
    tables = [h for h in history if "samples._type" in h]
    assert [h["samples._type"] for h in tables] == ["incremental-table-file"] * 2

    # A resumed run is the same run to W&B.
    resumed = build_loggers(configured("wandb"), tmp_path, ABOUT)
    assert resumed[1].version == run["run_id"]
    close_loggers(resumed, exit_code=0)


def records(folder: Path) -> list[dict[str, Any]]:
    """What was given to W&B's latest offline run in a folder."""
    run = max((folder / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_ctime_ns)
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def history_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record["history"]["item"] for record in found if record["type"] == "history"]


def test_long_tags_are_cut_and_stay_unique() -> None:
    low, high = (fitted(f"{'x' * 70}{i}", 64) for i in (1, 2))
    assert (len(low), len(high)) == (64, 64)
    assert low != high
    assert fitted("x" * 64, 64) == "x" * 64


def test_a_run_goes_on_offline_where_wandb_is_away(
    monkeypatch: pytest.MonkeyPatch, fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """W&B raises a CommError once `init_timeout` is over, of which its own tries take ten."""
    init = wandb.init

    def away(**options: Any) -> Any:
        if options["mode"] == "online":
            assert options["settings"].init_timeout == 1
            raise CommError("timed out")
        return init(**options)

    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(wandb, "init", away)
    loggers = build_loggers(configured("wandb", init_timeout_s=1), tmp_path, ABOUT)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("W&B: offline, as W&B did not answer in 1 s (logger.init_timeout_s);")
    fit(FakePPO(), [PPOMetrics()], loggers, batches=2)
    close_loggers(loggers, exit_code=0)
    assert history_of(records(tmp_path))


def test_a_key_that_wandb_refuses_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(**options: Any) -> None:
        assert options["mode"] == "online"  # not once more, offline
        raise AuthenticationError("invalid API key")

    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"^W&B refuses the key .*: invalid API key\. Set it"):
        build_loggers(configured("wandb"), tmp_path, ABOUT)


def kill_wandb() -> int:
    """Kill the processes that W&B sends in, of this process's children (Linux); return how many."""
    killed = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # one that ended meanwhile
            pid, name, state, parent = path.read_text().split()[:4]
            if name == "(wandb-core)" and state != "Z" and int(parent) == os.getpid():
                os.kill(int(pid), signal.SIGKILL)
                killed += 1
    return killed


class KillsWandb(Callback):
    """Ends W&B's process after a batch."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.iteration == self.after:
            assert kill_wandb() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
def test_a_run_goes_on_where_wandb_dies(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Curves, tables and the end of the run go to a process that is no more."""
    config = configured("wandb", mode="offline")
    loggers = build_loggers(config, tmp_path, ABOUT)
    capsys.readouterr()
    samples = Samples(tmp_path, 1, 1, 50)
    fit(FakePPO(), [samples, PPOMetrics(), KillsWandb(2)], loggers, batches=4)
    picture = tmp_path / "picture.png"
    imsave(picture, [[0.0, 1.0]])
    log_pictures(loggers, {"picture": picture}, 4)
    close_loggers(loggers, exit_code=0)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "W&B" in x]
    assert line == (
        "W&B: its process has ended; the run goes on without it: metrics.csv has every row, W&B "
        "those before at most"
    )
    rewards = [row["reward_mean"] for row in read(tmp_path / "metrics.csv")]
    assert rewards == ["1.5", "2.5", "3.5", "4.5"]
    assert len((tmp_path / "samples" / "train.jsonl").read_text().splitlines()) == 4

    # The next run in this process, as of a sweep, has W&B again.
    (tmp_path / "again").mkdir()
    again = build_loggers(config, tmp_path / "again", ABOUT)
    again[1].log_metrics({"reward_mean": 1.0}, step=5)
    close_loggers(again, exit_code=0)
    assert [h["iteration"] for h in history_of(records(tmp_path / "again"))] == [5]
