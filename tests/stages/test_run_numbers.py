"""Amounts of compute as text, and numbers that a run measured once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.evaluation.run_report import (
    amount,
    leave_report,
    reward_verdicts,
)
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
