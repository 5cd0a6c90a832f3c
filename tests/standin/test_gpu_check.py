"""The check of a GPU on the stand-in: a complete table, measured equality, its budget."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import on_device
from .device import NAME, Device, register

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_rows
from gpu_check import check, report_of
from gpu_rows import ROWS
from gpu_runs import STEPS, TINY, CheckError, Found, Place, Row, agreement
from gpu_worker import Outcome, attempt

ENDED = "bitsandbytes int8"
"""Name of the rows for which the budget of the test leaves no time."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    register()
    threads = torch.get_num_threads()
    yield Place(
        device=torch.device(NAME, 0), words=("trainer=cpu",), arguments=on_device, gpus=1,
        folder=tmp_path,
    )  # fmt: skip
    torch.set_num_threads(threads)


class Clock:
    """A clock that a row advances by its usual duration."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


def no_checkpoint(place: Place, row: Row, seconds: float) -> Found:
    raise OSError("no space left\non the device")


@pytest.fixture
def outcomes(
    device: Device, place: Place, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[str, str], Outcome]:
    """Name and shape -> outcome; the true shape has no checkpoint."""
    few = ("rollout_batch_size=4", "minibatch_size=4", "microbatch_size=4", "max_response_tokens=6")
    monkeypatch.setitem(STEPS[TINY], "ppo", (*few, "iterations=2", "ppo_epochs=1"))
    rows = [replace(r, work=no_checkpoint) if r.work is gpu_rows.make else r for r in ROWS]
    clock, limits = Clock(), []

    def run(row: Row, seconds: float) -> Outcome:
        limits.append((row.seconds, seconds))
        clock.seconds += row.seconds
        return attempt(row, place, seconds)

    usual = sum(r.seconds for r in rows if not (r.on_all or {*r.needs} - {"bitsandbytes"}))
    budget = usual - sum(r.seconds for r in rows if r.name == ENDED) + 1
    found = check(rows, place, run, budget, clock.now)
    assert clock.seconds <= budget
    assert all(usual <= given <= 3 * usual for usual, given in limits)
    return {(o.row.name, o.row.shape): o for o in found}


def test_the_table(outcomes: dict[tuple[str, str], Outcome], place: Place) -> None:
    """Every row has a result; those of the tiny shape agree with the CPU, by measurement."""
    assert len(outcomes) == len(ROWS)
    for (name, shape), outcome in outcomes.items():
        if name == "limits of the GPU":
            assert {*outcome.found.limits} == {"float32", "bfloat16", "memory"}
        elif name == "checkpoint":
            assert (outcome.status, outcome.reason) == ("failed", "OSError: no space left")
        elif outcome.row.on_all:
            assert (outcome.status, outcome.reason) == ("not run", "one GPU")
        elif {*outcome.row.needs} - {"bitsandbytes"}:
            missing = ", ".join(outcome.row.needs)
            assert (outcome.status, outcome.reason) == ("not run", f"not installed: {missing}")
        elif name == ENDED:
            assert (outcome.status, outcome.reason) == ("not run", "time")
        elif shape == TINY:
            assert outcome.status == "passed", outcome
        else:
            assert outcome.status == "failed"
            assert outcome.reason == (
                f"{place.folder / 'model'} is missing: the row that makes it was not run, or failed"
            )
    ppo = outcomes["tiny ppo", TINY].found
    assert ppo.equality.startswith("4 of 4 responses, loss to ")
    assert {*ppo.tokens_per_s} == {*ppo.flops_per_s} == {"rollout", "score", "update"}
    assert {*ppo.roles} == {"base", "policy", "reward", "critic"}
    assert outcomes["tiny sft", TINY].found.equality.startswith("loss to ")
    text = report_of(list(outcomes.values()), place, 10)
    assert text.count("\n| ") == len(ROWS) + 2
    assert "passed" in text


def test_agreement() -> None:
    """loss 2 against 2.0001 is 5e-5 apart; gradients below 0.1 are compared with 0.1."""
    one: dict[str, Any] = {"tokens": [[1, 2], [3]] * 50, "loss": 2.0001, "grad_norm": 0.001}
    other = one | {"loss": 2.0, "grad_norm": 0.001002}
    assert agreement(one, other) == "100 of 100 responses, loss to 5e-05, grad_norm to 2e-05"
    some = one | {"tokens": [[1, 2], [4], *one["tokens"][2:]], "loss": 9.0}
    assert agreement(some, other) == "99 of 100 responses"
    with pytest.raises(CheckError, match="3 of 100 responses are not those of the CPU"):
        agreement(one | {"tokens": [[5]] * 3 + one["tokens"][3:]}, other)
    with pytest.raises(CheckError, match=r"grad_norm is nan, 0\.001002 on the CPU"):
        agreement(one | {"grad_norm": float("nan")}, other)
