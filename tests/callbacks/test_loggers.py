"""metrics.csv, TensorBoard and W&B, which may be away at the start, or end within a run."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
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
    RunIdentity,
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
IDENTITY = RunIdentity(
    name="lr/tiny/seed-1/ppo", run="lr", model="tiny", job="seed-1", stage="ppo",
    config={"seed": {"a": 1}},
)  # fmt: skip
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
    """A row that is added may be there in part; a file written anew is the one before."""
    path, file = tmp_path / "metrics.csv", MetricsFile(tmp_path)
    file.log_metrics({"entropy": 1.0}, step=1)
    assert path.stat().st_size == 14 + 7  # "step,entropy" and "1,1.0" with their ends of lines
    told = rf"^{path} was not written: File too large\. It needs .* may have 0\.0 kB \(ulimit -f\)"
    with pytest.raises(StorageError, match=told), largest_file(20):
        MetricsFile(tmp_path).log_metrics({"eval/kl": 2.0}, step=1)
    assert (read(path), list(tmp_path.iterdir())) == ([{"step": "1", "entropy": "1.0"}], [path])
    told = rf"^{path} was not written: File too large; .* may have 0\.0 kB \(ulimit -f\)\. Raise"
    with pytest.raises(StorageError, match=told), largest_file(23):
        file.log_metrics({"entropy": 2.0}, step=2)
    after = MetricsFile(tmp_path)
    after.rewind(1)
    after.log_metrics({"entropy": 3.0}, step=2)
    assert [row["entropy"] for row in read(path)] == ["1.0", "3.0"]


@pytest.mark.parametrize("line", ["two,1.0", "2,high", "2,1.0,3.0", "2", "-1,1.0", "1,1.0"])
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(f"step,entropy\n1,1.0\n{line}\n")
    with pytest.raises(CheckpointError, match=rf"^{path}, line 3, is damaged: found '{line}'; al"):
        MetricsFile(tmp_path)
    path.write_bytes(b"step,entropy\n1,\xff\n")
    with pytest.raises(CheckpointError, match=rf"^{path} is damaged: byte 16 is no UTF-8"):
        MetricsFile(tmp_path)


# TensorBoard


def test_tensorboard_has_the_curves_the_samples_and_no_later_steps_after_a_rewind(
    fit: Fit, tmp_path: Path
) -> None:
    samples = Samples(every_n_iterations=2, count=1, characters=50, run_dir=tmp_path)
    loggers = build_loggers(configured("tensorboard"), tmp_path, IDENTITY)
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
        ("online", None, "variable", "online"),
        ("offline", None, "variable", "offline"),
        ("online", "disabled", None, "disabled"),
        ("online", None, None, None),  # refused before anything starts
        ("auto", "online", None, None),
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
    loggers = build_loggers(configured("wandb"), tmp_path, IDENTITY)
    said = capsys.readouterr().out
    assert said.startswith("W&B: offline, as WANDB_API_KEY and netrc hold no key; upload later")
    assert said.count("\n") == 1

    samples = Samples(every_n_iterations=1, count=2, characters=50, run_dir=tmp_path)
    diagnosis = Diagnosis(SimpleNamespace(), tmp_path, rules=[second])  # type: ignore[arg-type]
    fit(FakePPO(), [PPOMetrics(), diagnosis, samples], loggers, batches=2)
    close_loggers(loggers, exit_code=0)
    found = records(tmp_path)
    alerts = [record["alert"] for record in found if record["type"] == "alert"]
    assert [{key: alert[key] for key in ("title", "text", "level")} for alert in alerts] == [
        {
            "title": "second",
            "text": "in the second iteration (2 iterations): a cause. a remedy",
            "level": "WARN",
        }
    ]
    run = next(r["run"] for r in found if r["type"] == "run")
    assert run["run_id"] == (tmp_path / "wandb_id.txt").read_text()
    assert run["display_name"] == "lr/tiny/seed-1/ppo"
    assert run["tags"] == ["ppo", "tiny", "seed-1"]
    assert run["run_group"] == "lr"
    assert run["config"]["update"]["seed"] == {"a": 1}
    axis = [r["metric"] for r in found if r["type"] == "metric"]
    assert (axis[-1]["glob_name"], axis[-1]["step_metric"]) == ("*", "iteration")
    history = history_of(found)
    assert set(HEADLINES) <= {key for h in history for key in h}
    curve = [(h["iteration"], h["reward_mean"]) for h in history if "reward_mean" in h]
    assert curve == [(1, 1.5), (2, 2.5)]
    tables = [h for h in history if "samples._type" in h]
    assert [h["samples._type"] for h in tables] == ["incremental-table-file"] * 2

    # A resumed run is the same run to W&B.
    resumed = build_loggers(configured("wandb"), tmp_path, IDENTITY)
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


def test_the_jobs_of_a_sweep_have_tags_and_names_of_their_own() -> None:
    short = replace(IDENTITY, job="kl_coef=0.1,seed=1")
    assert short.tags == ["ppo", "tiny", "kl_coef=0.1,seed=1", "kl_coef=0.1", "seed=1"]
    for job, values in (
        ("advantage=reinforce++", []),
        ("advantage=reinforce++,lr=0.1", ["advantage=reinforce++", "lr=0.1"]),
        ("kinds=-a,b-,seed=1-0a1b2c3d", ["kinds=-a,b-", "seed=1-0a1b2c3d"]),
    ):
        assert replace(IDENTITY, job=job).tags == ["ppo", "tiny", job, *values]
    assert replace(IDENTITY, job=None).tags == ["ppo", "tiny"]
    low, high = (replace(IDENTITY, job=f"{'x' * 70}{i}").tags for i in (1, 2))
    assert low != high
    assert all(1 <= len(tag) <= 64 for tag in (*low, *high))
    assert (fitted("x" * 128, 128), len(fitted("x" * 129, 128))) == ("x" * 128, 128)


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
    loggers = build_loggers(configured("wandb", init_timeout_s=1), tmp_path, IDENTITY)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("W&B: offline, as W&B did not answer in 1 s (logger.init_timeout_s);")
    fit(FakePPO(), [PPOMetrics()], loggers, batches=2)
    close_loggers(loggers, exit_code=0)
    assert history_of(records(tmp_path))


def test_a_key_that_wandb_refuses_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def refuse(**options: Any) -> None:
        asked.append(options)
        raise AuthenticationError("invalid API key")

    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(wandb, "init", refuse)
    config = configured("wandb", init_timeout_s=11, finish_timeout_s=7)
    with pytest.raises(ConfigError, match=r"^W&B refuses the key .*: invalid API key\. Set it"):
        build_loggers(config, tmp_path, IDENTITY)
    (once,) = asked  # not once more, offline
    assert once["mode"] == "online"
    assert (once["settings"].init_timeout, once["settings"].finish_timeout) == (11, 7)


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
    """Ends W&B's process after the given one of a fit's batches."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.iteration == self.batch:
            assert kill_wandb() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
@pytest.mark.parametrize("killed_after", [2, 4], ids=["in the middle", "before it is closed"])
def test_a_run_goes_on_where_wandb_dies(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str], killed_after: int
) -> None:
    """Curves, tables and the end of the run go to a process that is no more."""
    config = configured("wandb", mode="offline")
    loggers = build_loggers(config, tmp_path, IDENTITY)
    capsys.readouterr()
    samples = Samples(every_n_iterations=1, count=1, characters=50, run_dir=tmp_path)
    fit(FakePPO(), [samples, PPOMetrics(), KillsWandb(killed_after)], loggers, batches=4)
    picture = tmp_path / "picture.png"
    imsave(picture, [[0.0, 1.0]])
    if killed_after == 2:
        log_pictures(loggers, {"picture": picture}, 4)
    close_loggers(loggers, exit_code=0)
    said = capsys.readouterr()
    (line,) = [line for line in said.out.splitlines() if "W&B" in line]
    assert line == (
        "W&B: its process has ended; the run goes on without it: metrics.csv has every row, W&B "
        "those before at most"
    )
    # W&B adds a line of its own where it meets the end of its process only as it finishes.
    assert said.err in ("", "wandb: ERROR Problem finishing run\n")
    rewards = [row["reward_mean"] for row in read(tmp_path / "metrics.csv")]
    assert rewards == ["1.5", "2.5", "3.5", "4.5"]
    assert len((tmp_path / "samples" / "train.jsonl").read_text().splitlines()) == 4

    # The next run in this process, as of a sweep, has W&B again; also where it dies in between.
    for name in ("again", "once more"):
        (tmp_path / name).mkdir()
        again = build_loggers(config, tmp_path / name, IDENTITY)
        again[1].log_metrics({"reward_mean": 1.0}, step=5)
        close_loggers(again, exit_code=0)
        assert [h["iteration"] for h in history_of(records(tmp_path / name))] == [5]
        if name == "again":
            kill_wandb()
