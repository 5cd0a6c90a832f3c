"""Amounts of compute as text, and numbers that a run measured once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rlhf.report.conclusion import Evaluated
from lightning_rlhf.stages.rank import STAGE
from lightning_rlhf.stages.run_files import RunFiles
from lightning_rlhf.stages.run_numbers import amount, results, single_numbers


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (139_638, "tokens", "139,638 tokens"),
        (2.148e12, "FLOP", "2.15 TFLOP"),
        (8.059e8, "bytes", "805.90 MB"),
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
                   definition=STAGE, curves=curves, manifest=None)  # fmt: skip
    evaluated = [Evaluated(metric="eval/judge/gold", value=0.3)]
    (table,) = single_numbers(run, evaluated)
    assert table.rows == [
        ["rank/best_reward", "0.747", "score"], ["rank/pairs", "1,449", "pairs"],
    ]  # fmt: skip
    assert results(run, evaluated) == (
        "the reward of the best response to each prompt is 0.747; the number of preference pairs "
        "is 1,449"
    )
