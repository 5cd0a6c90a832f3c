"""A run in several processes: the same files as those of one, and an end whatever process ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lightning_rlhf.cli import launch as launching
from lightning_rlhf.cli.launch import run_processes
from lightning_rlhf.core.errors import ConfigError, RLHFError
from lightning_rlhf.parallel.world import World
from lightning_rlhf.runs import console
from lightning_rlhf.runs.accelerator import check_processes
from lightning_rlhf.stages import fit

from ..matrix import matrix
from ..processes import SRUN, forked
from .conftest import MINI, TRAIN_PY, Outcome, Workplace, given, rows, tree, weights
from .test_pipeline import start, wait_for

ROUNDING = 1e-5
"""Difference that the order of sums makes, relative to the norm of the weights."""


def in_processes(place: Workplace, size: int, *overrides: str, folder: Path) -> Outcome:
    """`python train.py model=mini overrides` in processes as torchrun starts them; the first's."""
    words = (*MINI, *overrides, f"trainer.devices={size}")
    outcomes = forked(size, lambda: place.call(*words), folder)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    for silent in outcomes[1:]:
        assert silent.out == ""
        assert silent.status == outcomes[0].status
        assert silent.err == ""
    first: Outcome = outcomes[0]
    return first


def assert_close(found: Path, expected: Path) -> None:
    """The weights in two `final/`, but for rounding."""
    names = [name for name in weights(expected.parent) if "fingerprint" not in name]
    assert names
    for name in names:
        one, other = (
            torch.cat([x.flatten().double() for x in load_file(folder / name).values()])
            for folder in (found, expected)
        )
        assert (one - other).norm() <= ROUNDING * other.norm(), name


def assert_same_rows(found: Path, expected: Path, but: Collection[str] = ()) -> None:
    """The same metrics, but for rounding and those of these names; one row a step."""
    many, one = rows(found), rows(expected)
    assert [row["step"] for row in many] == [row["step"] for row in one]
    for row, other in zip(many, one, strict=True):
        assert row.keys() == other.keys()
        for name, cell in [pair for pair in other.items() if pair[0] not in but]:
            assert float(row[name]) == pytest.approx(float(cell), rel=1e-4, abs=1e-4), name


@pytest.fixture(scope="module")
def place(pipeline: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace with the three stages by one process, and as run=two by two."""
    folder = tmp_path_factory.mktemp("two")
    found = pipeline.copied(folder / "work")
    for stage in ("sft", "rm", "ppo"):
        parents = [] if stage == "sft" else given(found)[: 1 + (stage == "ppo")]
        outcome = in_processes(found, 2, f"stage={stage}", "run=two", *parents, folder=folder)
        assert outcome.status == 0, outcome.err
    return found


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo"])
def test_two_processes_leave_what_one_does(place: Workplace, stage: str) -> None:
    one, two = place.stage(stage), place.stage(stage, "two")
    assert tree(two).keys() == tree(one).keys()
    assert_close(two / "final", one / "final")
    assert_same_rows(two, one)


def test_slurm_starts_the_processes(place: Workplace, tmp_path: Path) -> None:
    """Of a run with callbacks that need a logger, which the first process alone has."""
    words = (
        *MINI, "stage=sft", "run=slurm", "trainer.devices=2", "sft.epochs=0.25",
        "callbacks=monitor", "trainer.log_every_n_steps=1",
    )  # fmt: skip
    first, second = forked(2, lambda: place.call(*words), tmp_path, SRUN)
    assert (first.status, second.status) == (0, 0), first.err
    assert "computing on the CPU in 2 processes" in first.out
    folder = place.stage("sft", "slurm")
    assert (folder / "final" / "manifest.json").is_file()
    assert [name for row in rows(folder) for name in row if name.startswith("lr-")]


def test_the_processes_of_a_machine_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(fit, "THREADS", 6)
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for threads in (None, 2):
        given = {"threads": threads, "matmul_precision": "highest", "accelerator": "gpu"}
        settings: Any = SimpleNamespace(trainer=SimpleNamespace(devices=2, **given), seed=0)
        fit.set_up(settings)
    assert asked == [3, 2]


@pytest.mark.parametrize(("before", "after"), matrix([(2, 2), (1, 2)], (1, 2)))
def test_a_run_goes_on_in_another_number_of_processes(
    place: Workplace, tmp_path: Path, before: int, after: int
) -> None:
    run = "default" if before == 1 else "two"
    found = place.copied(tmp_path / "work")
    folder = found.stage("ppo", run)
    shutil.rmtree(folder / "final")
    parents = given(place) if before == 2 else []
    command = ["stage=ppo", f"run={run}", "resume=2", *parents]
    in_processes(found, after, *command, folder=tmp_path).succeeded  # noqa: B018
    unbroken = place.stage("ppo", run)
    assert_same_rows(folder, unbroken)
    if before == after:
        assert weights(folder) == weights(unbroken)
        assert rows(folder) == rows(unbroken)
    else:
        assert_close(folder / "final", unbroken / "final")


def test_processes_that_share_the_base_leave_what_one_does(
    place: Workplace, tmp_path: Path
) -> None:
    """Also where one process goes on, which then holds the whole base."""
    found = place.copied(tmp_path / "work")
    words = ["stage=ppo", "run=shared", *given(place), "trainer.strategy=fsdp"]
    outcome = in_processes(found, 2, *words, "debug=true", folder=tmp_path)
    assert outcome.status == 0, outcome.err
    assert "kernels: plain (the weights are sharded)" in outcome.out
    one, shared = place.stage("ppo"), found.stage("ppo", "shared")
    assert tree(shared).keys() == tree(one).keys()
    assert_close(shared / "final", one / "final")
    assert_same_rows(shared, one)
    shutil.rmtree(shared / "final")
    found.mini(*words, "resume=2").succeeded  # noqa: B018
    assert_close(shared / "final", one / "final")


def test_a_base_that_cannot_be_shared_is_refused(place: Workplace) -> None:
    words = ["stage=sft", "run=refused", "trainer.strategy=fsdp", "sft.finetune=full"]
    for word in ("model.kernels=fast", "optimizer=muon"):
        error = place.mini(*words, word).error
        assert re.search(rf"{word.split('=')[0]}\S* is .*; allowed: .*, as trainer.strat", error)


def test_a_reward_is_asked_once_a_response(place: Workplace, tmp_path: Path) -> None:
    (place.folder / "count.py").write_text(
        "def score(prompts, responses):\n"
        f"    with open({str(tmp_path / 'asked')!r}, 'a') as file:\n"
        "        file.writelines(f'{p}|{r}\\n' for p, r in zip(prompts, responses))\n"
        "    return [float(len(r)) for r in responses]\n"
    )
    asked = []
    for size in (1, 2):
        words = ["stage=ppo", f"run=asked{size}", given(place)[0], "reward=function",
                 "reward.path=count.py:score", "ppo.iterations=1", "preflight=off"]  # fmt: skip
        if size == 1:
            place.mini(*words).succeeded  # noqa: B018
        else:
            in_processes(place, 2, *words, folder=tmp_path).succeeded  # noqa: B018
        asked.append(sorted((tmp_path / "asked").read_text().splitlines()))
        (tmp_path / "asked").unlink()
    assert asked[0] == asked[1]


def test_a_reward_that_fails_in_one_process_ends_all_with_its_message(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the launcher, which sees the other process end, ends the first one meanwhile."""
    monkeypatch.setattr(fit, "leave_report", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    (place.folder / "fails.py").write_text(
        "import os\n"
        "def score(prompts, responses):\n"
        "    return [float('nan' if os.environ['RANK'] == '1' else 1) for r in responses]\n"
    )
    outcome = in_processes(
        place, 2, "stage=ppo", "run=fails", given(place)[0], "reward=function",
        "reward.path=fails.py:score", "preflight=off", folder=tmp_path,
    )  # fmt: skip
    assert outcome.status == 1
    assert "reward 'function' gave nan for the response" in outcome.error


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["stage=ppo", "trainer.devices=3"], "torchrun has started 2 processes; allowed: equal"),
        (["stage=ppo", "trainer.devices=2", "ppo.samples_per_prompt=8"],
         "ppo.rollout_batch_size is 8, which is 1 prompts for 2 processes; allowed: at least 16"),
    ],
)  # fmt: skip
def test_other_numbers_of_processes_are_refused(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, overrides: list[str], expected: str
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    assert expected in place.mini(*overrides, "run=refused").error


def test_an_error_that_all_processes_meet_is_printed_once(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one status in all: the others wait, and are ended by the launcher meanwhile."""
    monkeypatch.setattr(console.time, "sleep", lambda seconds: sys.exit(1))
    outcome = in_processes(workplace, 2, "stage=sft", "sft.lr=-1", folder=workplace.folder)
    assert "sft.lr is -1; allowed: a number" in outcome.error


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ({0: 3, 1: -signal.SIGTERM}, "3"),  # process 0 has printed why
        ({0: -signal.SIGTERM, 1: -signal.SIGKILL}, "process 1 of the run was ended by SIGKILL"),
        ({0: -signal.SIGTERM, 1: -signal.SIGTERM}, "process 0 of the run was ended by SIGTERM"),
    ],
)
def test_the_process_that_a_signal_has_ended(
    monkeypatch: pytest.MonkeyPatch, failures: dict[int, int], message: str
) -> None:
    ended = {rank: ProcessFailure(rank, 7, status, "none") for rank, status in failures.items()}
    monkeypatch.setattr(launching, "launch", lambda *_: ended)
    monkeypatch.setattr(launching, "own_configs", list)
    trainer = SimpleNamespace(num_nodes=1, devices=2, accelerator="cpu")
    settings: Any = SimpleNamespace(
        trainer=trainer, resume=False, overwrite=False, job=None, run="r", stage="rank",
        definition=SimpleNamespace(trains=False), outputs=Path(), model=SimpleNamespace(name="m"),
    )  # fmt: skip
    with pytest.raises((RLHFError, SystemExit), match=message):
        run_processes(settings, [])


def test_a_job_of_a_sweep_is_marked_with_the_error_of_its_processes(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file that torchrun's launcher reads. The process itself has printed the error."""
    file = tmp_path / "error.json"

    def launch(size: int, command: list[str], said: str) -> dict[int, ProcessFailure]:
        with monkeypatch.context() as patch:
            patch.setenv(console.ERROR_FILE, str(file))
            console.print_error("no such model")
        ended = ProcessFailure(1, 8, -signal.SIGTERM, "none")
        return {1: ended, 0: ProcessFailure(0, 7, 1, str(file))}

    monkeypatch.setattr(launching, "launch", launch)
    outcome = workplace.sweep("stage=sft", "trainer.devices=2", "seed=choice(1)")
    assert outcome.status == 1
    assert outcome.err.count("error: no such model") == 1
    (failed,) = workplace.outputs.rglob("failed.txt")
    assert failed.read_text() == "no such model\n"


def test_a_stage_that_does_not_train_computes_in_one_process() -> None:
    """Whatever trainer.devices is; in several, unless they divide its work, it is refused."""
    settings: Any = SimpleNamespace(
        stage="own", config=None, trainer=SimpleNamespace(processes=2, devices=2, num_nodes=1),
        definition=SimpleNamespace(trains=False, divides=False),
    )  # fmt: skip
    for nodes in (2, 1):
        settings.trainer.num_nodes = nodes
        check_processes(settings, World())
    with pytest.raises(ConfigError, match="stage=own computes in one; allowed: one process"):
        check_processes(settings, World(size=2, launcher="torchrun"))


LONG = ("stage=ppo", "ppo.iterations=200", "ppo.val_every=200", "ppo.checkpoint_every=2",
        "preflight=off")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", matrix([signal.SIGKILL, signal.SIGTERM], signal.SIGKILL))
def test_the_launcher_ends_all_processes(place: Workplace, how: signal.Signals) -> None:
    run, parents = f"ends_{how.name}", given(place)
    words = [*MINI, *LONG, f"run={run}", "trainer.devices=2", *parents]
    process = start(place, *words)
    folder = place.stage("ppo", run)
    wait_for(folder / "checkpoints" / "000002.ckpt", process)
    found = children(process.pid)
    assert len(found) == 2
    ended = time.monotonic()
    if how == signal.SIGKILL:
        os.kill(found[1], how)
    else:
        process.send_signal(how)
    out = process.communicate(timeout=60)[0]
    assert time.monotonic() - ended < 30
    assert not any(Path(f"/proc/{pid}").exists() for pid in found)
    if how == signal.SIGKILL:
        assert process.returncode == 1
        assert out.count("error: ") == 1
        assert "error: process 1 of the run was ended by SIGKILL, and the others with it" in out
        assert "ending after this step" not in out
    else:
        assert process.returncode == 128 + signal.SIGTERM
        assert out.count("ending after this step") == 1
        assert "stopped; resume=auto goes on from the checkpoint of step " in out
    newest = max(int(path.stem) for path in (folder / "checkpoints").glob("0*.ckpt"))
    outcome = place.mini(
        *LONG, f"run={run}", *parents, "resume=true", "trainer.max_time=00:00:00:01"
    )
    assert f"checkpoints/{newest:06d}.ckpt" in outcome.out
    assert int(float(rows(folder)[-1]["step"])) > newest


def children(parent: int) -> list[int]:
    """Numbers of the processes that `parent` has started, by rank."""
    return [*map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())]


@pytest.mark.slow
def test_two_launchers_stand_for_two_machines(place: Workplace) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
                "--master-addr=127.0.0.1", f"--master-port={port}"]  # fmt: skip
    words = (*MINI, "stage=sft", "run=nodes", "trainer.num_nodes=2")
    launchers = [
        start(place, f"--node-rank={node}", TRAIN_PY[1], *words, python=torchrun)
        for node in range(2)
    ]
    outs = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outs
    assert_close(place.stage("sft", "nodes") / "final", place.stage("sft") / "final")
    assert "sft finished" in outs[0]
    assert "sft" not in outs[1]
