"""The rows of a kept batch as they are shown."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from io import StringIO
from typing import Any

import torch
from rich.console import Console

from lightning_rlhf.data.last_batch import LastBatch
from lightning_rlhf.data.lengths import DemonstrationTokens, DialogueTokens, PreferenceTokens
from lightning_rlhf.replay.row_figures import (
    ReplayedRow,
    heading,
    not_finite_rows,
    replayed_rows,
    rows_on_terminal,
)

WORDS = {1: "<|user|>", 2: "[red]", 3: " b", 4: "\x1b[31m", 5: "."}
P = math.log(0.5)


def show(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def kept(stage: Any, examples: Sequence[Any]) -> LastBatch:
    return LastBatch(
        stage=stage,
        step=3,
        source="d.jsonl",
        unit="line",
        numbers=list(range(11, 11 + len(examples))),
        examples=examples,
        facts={},
        machine={},
    )


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


DEMONSTRATIONS = kept("sft", [
    DemonstrationTokens(ids(1), ids(2, 3)), DemonstrationTokens(ids(1), ids(4)),
    DemonstrationTokens(ids(1), ids(5)),
])  # fmt: skip
FACTS = {
    "loss": torch.tensor([-P, 2.0, math.nan]),
    "grad_norm": torch.tensor([1.0, 12345.678, 1.0]),
    "logprobs": torch.tensor([2 * P, 0.0, -2.0, math.nan]),  # of 2, 3 | 4 | 5
}


def shown(batch: LastBatch, rows: list[ReplayedRow], count: int) -> str:
    console = Console(file=StringIO(), width=120, force_terminal=True, color_system="standard")
    for part in rows_on_terminal(batch, rows, count):
        console.print(part)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_losses_of_earlier_turns_are_not_those_of_the_response() -> None:
    """Of three tokens of the prompt two are learned, whose losses come first."""
    batch = kept("sft", [DialogueTokens(ids(1, 3, 5), ids(2, 3), ids(1, 2))])
    facts = {"loss": torch.ones(1), "grad_norm": torch.ones(1)}
    facts["logprobs"] = torch.tensor([-4.0, -3.0, -2.0, -1.0])
    (row,) = replayed_rows(batch, facts, show)
    assert row.tokens == {"response": ["[red]", " b"]}
    assert row.losses == [2.0, 1.0]


def test_tokens_stand_beside_their_own_losses() -> None:
    rows = replayed_rows(DEMONSTRATIONS, FACTS, show)
    assert [row.place for row in rows] == ["line 11", "line 12", "line 13"]
    assert [row.tokens for row in rows] == [
        {"response": ["[red]", " b"]}, {"response": ["\x1b[31m"]}, {"response": ["."]},
    ]  # fmt: skip
    assert rows[0].losses == [torch.tensor(2 * math.log(2)).item(), 0.0]
    assert rows[1].losses == [2.0]
    assert [row.is_finite for row in rows] == [True, True, False]
    assert heading(rows[1]) == ("line 12: loss 2.0000, gradient norm 1.235e+04, response 1 token")


def test_what_is_not_finite_comes_first_then_the_largest_loss() -> None:
    rows = replayed_rows(DEMONSTRATIONS, FACTS, show)
    text = shown(DEMONSTRATIONS, rows, 2)
    assert text.index("line 13: loss nan") < text.index("line 12: loss 2.0000")
    assert "line 11" not in text
    assert "shown: 2 of 3 rows" in text
    assert "\x1b[31m'.'" in text  # red, since it is not finite
    assert "\x1b[1m'\\x1b[31m'" in text  # bold, since it is the largest; what it says is only text
    assert "'[red]'" in shown(DEMONSTRATIONS, rows, 3)


def test_a_gradient_counts_as_the_loss_does() -> None:
    facts = FACTS | {"loss": torch.ones(3), "grad_norm": torch.tensor([1.0, math.inf, 1.0])}
    rows = replayed_rows(DEMONSTRATIONS, facts, show)
    assert not_finite_rows(DEMONSTRATIONS, rows) == (
        "step 3 was not made: of 3 rows of d.jsonl 1 is not finite: line 12 (loss 1, gradient norm "
        "inf)"
    )
    facts["grad_norm"] = torch.ones(3)
    assert not_finite_rows(DEMONSTRATIONS, replayed_rows(DEMONSTRATIONS, facts, show)) == (
        "step 3 was not made: of 3 rows of d.jsonl each by itself has a finite loss and gradient"
    )


def test_ten_bad_rows_are_counted() -> None:
    batch = kept("sft", [DemonstrationTokens(ids(1), ids(5))] * 11)
    facts = {name: torch.full((11,), math.nan) for name in FACTS}
    for column in facts.values():
        column[10] = 1.0
    line = not_finite_rows(batch, replayed_rows(batch, facts, show))
    assert "of 11 rows of d.jsonl 10 are not finite: line 11 (" in line
    assert line.endswith("line 18 (loss nan, gradient norm nan), 2 more")


def test_where_all_rows_are_bad_the_weights_are_named() -> None:
    batch = kept("sft", [DemonstrationTokens(ids(1), ids(5))] * 10)
    facts = {name: torch.full((10,), math.nan) for name in FACTS}
    assert not_finite_rows(batch, replayed_rows(batch, facts, show)) == (
        "step 3 was not made: all 10 rows of d.jsonl are not finite: the weights, not the data; "
        "the first is line 11 (loss nan, gradient norm nan)"
    )


def test_a_pair_has_both_sides_and_their_scores() -> None:
    batch = kept("rm", [PreferenceTokens(ids(1), ids(2, 5), ids(3), 0.0)])
    numbers = {"loss": 0.25, "grad_norm": 0.5, "chosen_score": -0.75, "rejected_score": 2.0}
    rows = replayed_rows(batch, {k: torch.tensor([x]) for k, x in numbers.items()}, show)
    assert heading(rows[0]) == (
        "line 11: loss 0.2500, gradient norm 0.5, chosen -0.750, rejected +2.000, chosen 2 tokens, "
        "rejected 1 token"
    )
    lines = [line.split() for line in shown(batch, rows, 1).splitlines()]
    assert ["'[red]'", "'", "b'"] in lines
    assert ["'.'"] in lines
