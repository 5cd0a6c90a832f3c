"""Going on from the newest checkpoint, or from the one that is asked for; one run at a time."""

import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks.files import numbered, read_stamp
from lightning_rlhf.runs.folders import DELETED

from ..matrix import matrix
from .conftest import MINI, TRAIN_PY, Workplace, forking, make_workplace, rows, weights
from .test_pipeline import samples, start, wait_for


def checkpoints(place: Workplace, stage: str) -> list[str]:
    return sorted(path.stem for path in (place.stage(stage) / "checkpoints").iterdir())


def test_the_run_goes_on_from_the_checkpoint_that_is_named(
    finished: Workplace, pipeline: Workplace
) -> None:
    """The best one, that of step 2."""
    folder, unbroken = finished.stage("ppo"), pipeline.stage("ppo")
    shutil.rmtree(folder / "final")
    out = finished.mini("stage=ppo", "resume=best", "debug=true").succeeded.out
    assert weights(folder) == weights(unbroken)
    assert rows(folder) == rows(unbroken)
    assert samples(folder) == samples(unbroken)
    assert checkpoints(finished, "ppo") == checkpoints(pipeline, "ppo")
    assert "checkpoint 3: " in out


def test_what_is_later_than_the_checkpoint_is_forgotten(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off in the first iteration after it."""
    from lightning_rlhf.modules.ppo import PPOModule

    folder = finished.stage("ppo")
    shutil.rmtree(folder / "final")

    def pull(*arguments: Any) -> None:
        raise KeyError("plug")

    monkeypatch.setattr(PPOModule, "training_step", pull)
    assert "plug" in finished.mini("stage=ppo", "resume=2").err
    assert max(int(row["step"]) for row in rows(folder)) == 2
    assert max(samples(folder)) == "train.jsonl"
    assert "eval_000003.jsonl" not in samples(folder)
    assert '"iteration": 3' not in samples(folder)["train.jsonl"]
    assert "000003" not in checkpoints(finished, "ppo")


def test_what_is_refused_before_a_model_is_looked_for(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is not there, a damaged one, and one of another stage."""
    shutil.rmtree(finished.stage("sft") / "final")
    monkeypatch.setattr("lightning_rlhf.stages.fit.entered", None)
    error = finished.mini("stage=sft", "resume=4").error
    assert error.startswith("resume=000004: ")
    assert error.endswith("allowed: true, 000005, 000006, best")
    folder = finished.stage("sft") / "checkpoints"
    with (folder / "000006.ckpt").open("r+b") as file:
        file.truncate(1000)
    error = finished.mini("stage=sft", "resume=true").error
    assert "outputs/default/mini/sft/checkpoints/000006.ckpt cannot be read" in error
    assert error.endswith("Delete it, or give resume=000005, to go on from the one before it")
    foreign = finished.stage("rm") / "checkpoints" / "000006.ckpt"
    shutil.copy(foreign, folder / "000007.ckpt")
    error = finished.mini("stage=sft", "resume=true").error
    assert "000007.ckpt is foreign: of stage rm, not sft" in error


# Signals and locks, in processes.

SLOW = ("stage=sft", "sft.epochs=100", "sft.val_every=800", "sft.checkpoint_every=1000")
"""800 steps, of which a signal leaves some, and nothing is saved but for it."""


@pytest.fixture
def running(
    workplace: Workplace, request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[str]]:
    """A run that has come to its first row of metrics."""
    words = (*MINI, *SLOW, "trainer.log_every_n_steps=1", "trainer.threads=1")
    process = start(workplace, *words, python=TRAIN_PY, way=getattr(request, "param", forking))
    wait_for(workplace.stage("sft") / "metrics.csv", process)
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_one_process_at_a_time(workplace: Workplace, running: subprocess.Popen[str]) -> None:
    """The lock goes with the process, however that ends."""
    for override in ("resume=true", "overwrite=true", "seed=0"):
        error = workplace.mini(*SLOW, override).error
        assert "outputs/default/mini/sft is being written by another process" in error
        assert "run=NAME" in error
    running.kill()
    running.wait()
    assert "has no checkpoint to go on from" in workplace.mini(*SLOW, "resume=true").error
    workplace.mini("stage=sft", "overwrite=true").succeeded  # noqa: B018
    assert not list(workplace.outputs.rglob("*.lock"))


@pytest.mark.matrix
@pytest.mark.parametrize("running", [nullcontext], indirect=True)
def test_a_signal_saves_the_running_step(
    workplace: Workplace, running: subprocess.Popen[str]
) -> None:
    """Of a process with a start and an end of its own, as no other of these tests has."""
    how = signal.SIGINT  # SIGTERM goes through the recipe below
    running.send_signal(how)
    said = running.communicate(timeout=60)[0]
    assert running.returncode == 128 + how
    (path,) = numbered(workplace.stage("sft") / "checkpoints")
    found = torch.load(path, weights_only=True)
    assert read_stamp(path)["step"] == found["global_step"] == int(path.stem) > 0
    assert "a second SIG" in said
    assert said.count("stopped; resume=auto goes on from the checkpoint of step ") == 1


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(workplace: Workplace) -> None:
    """In an evaluation batch that takes a minute, of a function as a reward."""
    rules, asked = workplace.folder / "slow.py", workplace.folder / "asked"
    rules.write_text(
        "import pathlib, time\n"
        "def slow(prompts, responses):\n"
        f"    pathlib.Path({str(asked)!r}).touch()\n"
        "    for _ in range(600):\n"
        "        time.sleep(0.1)\n"
        "    return [0.0] * len(responses)\n"
    )
    process = start(
        workplace, *MINI, "stage=ppo", "policy.checkpoint=base", "reward=function",
        f"reward.path={rules}:slow",
    )  # fmt: skip
    wait_for(asked, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_a_recipe_passes_a_signal_on_and_waits(tmp_path: Path) -> None:
    """One message for both processes; the same command goes on."""
    place = make_workplace(tmp_path / "work")
    own = ("sft.epochs=25", "sft.val_every=200", "sft.checkpoint_every=1000",
           "rm.epochs=0.25", "ppo.iterations=1", "trainer.log_every_n_steps=1")  # fmt: skip
    process = start(place, *MINI, "recipe=quickstart", *own)
    folder = place.outputs / "default" / "mini" / "sft"
    wait_for(folder / "metrics.csv", process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert said.count("stopped; ") == 1
    assert "stopped; the same command goes on" in said
    assert len(numbered(folder / "checkpoints")) == 1, "the stage was not waited for"


# A disk that is full.


@pytest.mark.slow
@pytest.mark.parametrize("what", matrix(["checkpoint", "final"], "checkpoint"))
def test_a_full_disk_is_one_message_and_the_run_goes_on_afterwards(
    workplace: Workplace, pipeline: Workplace, what: str
) -> None:
    """A checkpoint, with the optimizer's state, has three times the bytes of the weights."""
    folder = workplace.stage("sft")
    room = (pipeline.stage("sft") / "final" / "model.safetensors").stat().st_size
    again = [] if what == "checkpoint" else ["resume=true"]
    if again:
        shutil.copytree(pipeline.stage("sft"), folder)
        shutil.rmtree(folder / "final")
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (room - 1, room - 1))
    process = start(workplace, *MINI, "stage=sft", *again, before=limit)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert "Traceback" not in said
    target = folder / ("checkpoints/000001.ckpt" if what == "checkpoint" else "final")
    error = said.strip().splitlines()[-1]
    assert f"{target.relative_to(workplace.folder)} was not written: File too large." in error
    assert not target.exists()
    assert not list(folder.rglob("*.tmp"))
    assert error.endswith("resume=auto goes on from the checkpoint of step 6" if again else
                          "the same command starts it over")  # fmt: skip
    workplace.mini("stage=sft", *again).succeeded  # noqa: B018
    assert weights(folder) == weights(pipeline.stage("sft"))


PARENT = """
import sys
from lightning_rlhf.cli.launch import run_command
CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
run_command([sys.executable, "-c", CHILD], {})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell no child")
def test_a_command_ends_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = Path("/proc") / parent.stdout.readline().strip()
    assert child.exists()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while child.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists()


def test_what_a_kill_left_of_an_overwritten_run_is_no_part_of_the_next(finished: Workplace) -> None:
    left = finished.stage("sft") / DELETED
    (left / "checkpoints").mkdir(parents=True)
    (left / "checkpoints" / "000050.ckpt").touch()
    finished.mini("stage=sft", "overwrite=true").succeeded  # noqa: B018
    assert not left.exists()
    assert "000050" not in checkpoints(finished, "sft")
