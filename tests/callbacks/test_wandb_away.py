"""W&B goes away in the middle of a run, which goes on to its end without it."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.image import imsave

from lightning_rlhf.callbacks.evaluation import Samples
from lightning_rlhf.callbacks.logger_config import WandbConfig, WandbMode
from lightning_rlhf.callbacks.loggers import RunIdentity, build_loggers, close_loggers, log_pictures
from lightning_rlhf.callbacks.metrics import PPOMetrics

from .conftest import FakePPO, Fit

IDENTITY = RunIdentity(
    name="run/tiny/ppo", run="run", model="tiny", job=None, stage="ppo", config={"seed": 1}
)
CURVE = [(1, 1.5), (2, 2.5), (3, 3.5), (4, 4.5)]
"""FakePPO's reward_mean: its iteration + 0.5."""


def wandb_config(mode: WandbMode) -> WandbConfig:
    return WandbConfig(
        kind="wandb", project="test", entity=None, group=None, tags=[], mode=mode,
        init_timeout_s=30, finish_timeout_s=2,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    for folder in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder))


def curve(folder: Path) -> list[tuple[int, float]]:
    """reward_mean in metrics.csv."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), float(row["reward_mean"])) for row in csv.DictReader(file)]


def history(folder: Path) -> list[dict[str, Any]]:
    """What was logged in one of W&B's folders."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return [r["history"]["item"] for r in records if r["type"] == "history"]


class KillsWandb(Callback):
    """Ends the process that W&B sends in, after the given one of a fit's batches."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if index + 1 == self.batch:
            for pid in wandb_processes():
                os.kill(pid, signal.SIGKILL)


def wandb_processes() -> list[int]:
    """Of this process's children (Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # one that ended meanwhile
            pid, name, state, parent = path.read_text().split()[:4]
            if name == "(wandb-core)" and state != "Z" and int(parent) == os.getpid():
                found.append(int(pid))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
@pytest.mark.parametrize("killed_after", [2, 4], ids=["in the middle", "before it is closed"])
def test_a_run_goes_on_where_wandb_dies(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str], killed_after: int
) -> None:
    """Curves, tables and the end of the run go to a process that is no more."""
    config = wandb_config("offline")
    loggers = build_loggers(config, tmp_path, IDENTITY)
    assert len(wandb_processes()) == 1
    capsys.readouterr()
    samples = Samples(every_n_iterations=1, count=1, characters=50, run_dir=tmp_path)
    callbacks = [samples, PPOMetrics(), KillsWandb(killed_after)]
    fit(FakePPO(), callbacks, loggers, batches=4)
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
    assert curve(tmp_path) == CURVE
    assert len((tmp_path / "samples" / "train.jsonl").read_text().splitlines()) == 4

    # The next run in this process, as of a sweep, has W&B again.
    (tmp_path / "again").mkdir()
    again = build_loggers(config, tmp_path / "again", IDENTITY)
    again[1].log_metrics({"reward_mean": 1.0}, step=5)
    close_loggers(again, exit_code=0)
    (folder,) = (tmp_path / "again" / "wandb").glob("offline-run-*")
    assert [h["iteration"] for h in history(folder)] == [5]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
def test_a_run_begins_where_wandb_died_after_the_one_before(tmp_path: Path) -> None:
    """In one process, as of a sweep."""
    config = wandb_config("offline")
    close_loggers(build_loggers(config, tmp_path, IDENTITY), exit_code=0)
    for pid in wandb_processes():
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "again").mkdir()
    again = build_loggers(config, tmp_path / "again", IDENTITY)
    again[1].log_metrics({"reward_mean": 1.0}, step=5)
    close_loggers(again, exit_code=0)
    assert not again[1].is_gone


def test_what_else_fails_in_wandb_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A full disk, say."""
    loggers = build_loggers(wandb_config("disabled"), tmp_path, IDENTITY)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loggers[1].experiment, "log", full)
    with pytest.raises(OSError, match="No space left"):
        loggers[1].log_metrics({"reward_mean": 1.0}, step=1)
    close_loggers(loggers, exit_code=0)
