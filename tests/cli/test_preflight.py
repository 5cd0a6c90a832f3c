"""preflight=strict|warn|off, and the command check."""

import re
from pathlib import Path

import pytest

from ..matrix import matrix
from .conftest import MINI, STAGES, Workplace, given, rows, tree, weights

WRONG = f"ppo.rollout={Path(__file__).parent / 'wrong_sampler.py'}:Wrong"
FAULT = "ratio is "


def passed(out: str) -> int:
    """Number of checks in the line that a run without a fault prints."""
    found = re.search(r"^preflight: (\d+) checks passed in \d+\.\d s$", out, re.MULTILINE)
    assert found is not None, out
    return int(found[1])


@pytest.mark.parametrize(
    ("stage", "checks"), matrix([("sft", 3), ("rm", 4), ("ppo", 8)], ("ppo", 8))
)
def test_a_run_is_the_same_bit_for_bit_with_and_without_it(
    finished: Workplace, stage: str, checks: int
) -> None:
    words = [f"stage={stage}", "run=checked", *given(finished)[: STAGES.index(stage)]]
    out = finished.mini(*words, "preflight=warn", "debug=true").succeeded.out
    assert passed(out) == checks
    assert "memory plan" not in out
    checked, plain = finished.stage(stage, "checked"), finished.stage(stage)
    assert rows(checked) == rows(plain)
    assert weights(checked) == weights(plain)


def test_a_failed_check_is_a_warning_or_ends_the_run_before_it_writes(finished: Workplace) -> None:
    words = ["stage=ppo", "run=wrong", WRONG, "ppo.iterations=1", *given(finished)]
    error = finished.mini(*words, "preflight=strict").error
    assert error.startswith(f"preflight: {FAULT}")
    assert "allowed: <= 0.001; KL to the reference is " in error
    assert not finished.stage("ppo", "wrong").exists()
    out = finished.mini(*words, "preflight=warn").succeeded.out
    warnings = [line for line in out.splitlines() if line.startswith("warning: preflight: ")]
    assert [line.split(" is ")[0].removeprefix("warning: preflight: ") for line in warnings] == [
        "ratio", "KL to the reference",
    ]  # fmt: skip
    assert "│ failed" in out
    assert "preflight: 6 of 8 checks passed" in out


def test_check_and_plan_agree_and_write_nothing_whatever_the_folder_holds(
    finished: Workplace,
) -> None:
    before = tree(finished.outputs)
    for checks, words in (
        (4, ["stage=rm"]), (3, ["stage=sft", "run=new"]), (8, ["stage=ppo", "overwrite=true"]),
    ):  # fmt: skip
        out = finished.call("check", *MINI, *words).succeeded.out
        assert passed(out) == checks
        roles = planned(out)
        assert "base" in roles
        plan = planned(finished.call("plan", *MINI, *words).succeeded.out)
        plan.pop("sft", None)  # the plan assumes an adapter, and here SFT trained the whole model
        assert plan == roles
    assert tree(finished.outputs) == before
    assert not finished.stage("sft", "new").exists()


def planned(out: str) -> dict[str, list[str]]:
    """Cells of the memory plan by role; of the rollout its first cell, the copies of weights."""
    lines = [line.split() for line in out.partition("memory plan")[2].splitlines()]
    found = {cells[0]: cells[1:] for cells in lines if cells[-1:] in (["B"], ["kB"], ["MB"])}
    return {role: cells[:2] if role == "rollout" else cells for role, cells in found.items()
            if role != "update"}  # fmt: skip


def test_a_plan_needs_nothing_that_is_trained(workplace: Workplace) -> None:
    out = workplace.call("plan", *MINI, "stage=ppo", "trainer.devices=2", WRONG).succeeded.out
    assert {"base", "sft", "reward", "policy", "critic"} <= planned(out).keys()
    assert "for each of 2 processes on a CPU" in out
    assert not workplace.outputs.exists()
