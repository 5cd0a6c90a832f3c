"""Amounts of compute as text, and numbers that a run measured once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.evaluation.evaluate_policy import Rank
from lightning_rlhf.evaluation.run_report import (
    amount,
    leave_report,
    results,
    reward_verdicts,
    single_numbers,
)
from lightning_rlhf.report.run_page import Evaluated
from lightning_rlhf.runs.measured import RunFiles
from lightning_rlhf.stages.supervised import SFT


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (139_638, "tokens", "139,638 tokens"),
        (2.148e12, "FLOP", "2.15 TFLOP"),
        (270.0, "s", "4.5 min"),
    ],
)
def test_amounts(value: float, unit: str, shown: str) -> None:
    assert amount(value, unit) == shown


def test_numbers_of_ranked_responses(tmp_path: Path) -> None:
    curves = {
        "rank/best_reward": ([0], [0.74683]), "rank/pairs": ([0], [1449.0]),
        "eval/judge/gold": ([0], [0.3]), "time/x": ([0], [1.0]), "update/lr": ([1, 2], [1.0, 2.0]),
    }  # fmt: skip
    run = RunFiles(folder=tmp_path, tree={"stage": "rank", "model": {"name": "m"}},
                   definition=Rank(), curves=curves, manifest=None)  # fmt: skip
    evaluated = [Evaluated(metric="eval/judge/gold", value=0.3)]
    (table,) = single_numbers(run, evaluated)
    assert table.rows == [
        ["rank/best_reward", "0.747", "score"], ["rank/pairs", "1,449", "pairs"],
    ]  # fmt: skip
    assert results(run, evaluated) == (
        "the reward of the best response to each prompt is 0.747; the number of preference pairs "
        "is 1,449"
    )


def test_verdicts_in_numbers_from_elsewhere_are_verdicts_or_damage(tmp_path: Path) -> None:
    numbers = tmp_path / "final" / "evaluation.json"
    numbers.parent.mkdir()
    run: Any = SimpleNamespace(
        folder=tmp_path, manifest=None, curves={}, tree={}, stage="eval_policy",
        definition=SimpleNamespace(numbers=numbers.name),
    )  # fmt: skip
    fields = {"is_unfit": True, "words": "Not fit.", "reasons": []}
    numbers.write_text(json.dumps({"verdicts": {"model": fields}}))
    for reward, level in (([], "bad"), ({"weight": 0}, "unknown"),
                          ({"components": {"model": {"weight": 0}}}, "unknown")):  # fmt: skip
        run.tree = {"reward": reward}
        assert [one.level for one in reward_verdicts(run)] == [level]
    for damaged in ([], {"model": 1}, {"model": {"words": "Fit."}}, {"model": {**fields, "x": 1}}):
        numbers.write_text(json.dumps({"verdicts": damaged or [1]}))
        with pytest.raises(CheckpointError, match=r"evaluation\.json is damaged"):
            reward_verdicts(run)


def test_the_end_of_a_run_leaves_what_another_command_is_writing(tmp_path: Path) -> None:
    """As an export of an earlier step; a stale failed.txt goes."""
    export = tmp_path / ".0123.lightning-rlhf.tmp"
    for path in (export, tmp_path / "failed.txt"):
        path.touch()
    leave_report(tmp_path, SFT())
    assert list(tmp_path.iterdir()) == [export]
