"""Data that cannot be used; the table of rows and files is in tests/cli/refusals.yaml."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..conftest import MODULE, Workplace
from .conftest import Refusals, run

pytestmark = pytest.mark.usefixtures("no_model")

SFT = ["stage=sft"]
RM = ["stage=rm", "policy.checkpoint=base"]
KEY = "data.demonstrations.train"
GOOD = b'{"prompt": "a", "response": "b"}\n'
OTHER = b'{"prompt": "c", "response": "d"}\n'


def row(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (
            [*RM, "data.format=alpaca", "data.preferences.train=data/sft_train.jsonl"],
            ["data.format=alpaca holds demonstrations and prompts, no preferences", "helpsteer"],
        ),
        (
            [*RM, "data.preferences.train=data/sft_train.jsonl"],
            ["data/sft_train.jsonl, line 1: field 'chosen' is missing", "no preferences; "],
        ),
        ([*SFT, "data.format=alpca"], ["data.format is 'alpca'; allowed: auto, native, alpaca"]),
        ([*SFT, "data.train_on=first"], ["data.train_on is 'first'; allowed: last, all"]),
        ([*SFT, "data.columns.prompt=5"], ["data.columns is {'prompt': 5}; allowed: a mapping of"]),
        (
            [*SFT, "data.format=shp"],
            ["'history' is missing", "shp (history, ", "; its rows are of data.format=native (pro"],
        ),
    ],
)  # fmt: skip
def test_a_form_that_does_not_fit(refused: Refusals, command: list[str], named: list[str]) -> None:
    refused(*command, named=named)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (5, ["data.demonstrations.train is 5", "a file, a hub data set, or null"]),
        (["a", "b"], ["data.demonstrations.train is ['a', 'b']"]),
        (" ", ["data.demonstrations.train is ' '"]),
        ("a" * 300 + ".jsonl", ["data.demonstrations.train", "(306 characters)"]),
        ("a\x00.jsonl", ["data.demonstrations.train is 'a\\x00.jsonl'"]),
        ("~nobody-here/x.jsonl", ["~nobody-here/x.jsonl does not exist"]),
        ("https://me:s3cret@host/x.jsonl", ["https://***@host/x.jsonl does not exist"]),
        ("data/folder:train", ["'data/folder:train'", "org/name:split"]),
    ],
)
def test_a_source_that_is_none(refused: Refusals, source: Any, named: list[str]) -> None:
    """The last looks like a hub data set and is a folder of this machine."""
    (refused.folder / "data" / "folder").mkdir()
    error = refused.value(KEY, source, *SFT, named=named)
    assert "s3cret" not in error


def test_one_prompt_is_too_few_to_hold_one_out(refused: Refusals) -> None:
    (refused.folder / "data" / "x.jsonl").write_bytes(GOOD * 9)
    refused(*SFT, f"{KEY}=data/x.jsonl", "data.demonstrations.val=null",
            named=["data/x.jsonl has one prompt only"])  # fmt: skip


def test_rows_that_are_all_too_long(refused: Refusals) -> None:
    (refused.folder / "data" / "x.jsonl").write_bytes(row(prompt="a" * 9999, response="b"))
    named = ["no row of data/x.jsonl is left: 1 ", "data.max_prompt_tokens"]
    refused.value(KEY, "data/x.jsonl", *SFT, named=named)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + GOOD + OTHER,
        GOOD.replace(b"\n", b"\r\n") + OTHER,
        b'{"prompt": "a", "response": "b", "x": NaN}\n' + OTHER,
        GOOD + b"\n \n" + OTHER.rstrip(),
    ],
    ids=["BOM", "CRLF", "NaN in another column", "blank lines"],
)
def test_what_is_taken_on_purpose(refused: Refusals, content: bytes) -> None:
    """As far as the model, which the fixture stops."""
    (refused.folder / "data" / "x.jsonl").write_bytes(content)
    outcome = run(refused.place, KEY, "data/x.jsonl", *SFT)
    assert "2 demonstrations, too few to learn much from\n" in outcome.out
    assert "a model was loaded" in outcome.err


def test_rows_to_validate_on_are_counted_after_those_that_are_dropped(refused: Refusals) -> None:
    """Of 9 rows 4 are too long, and 3 of the other 5 are drawn."""
    texts = ["a" * (9999 if i % 2 else 1) + str(i) for i in range(9)]
    lines = b"".join(row(prompt=text, response="b") for text in texts)
    (refused.folder / "data" / "x.jsonl").write_bytes(lines)
    command = [*SFT, "data.demonstrations.val=data/x.jsonl"]
    outcome = run(refused.place, "data.max_val_rows", 3, *command)
    assert (
        "3 demonstrations to validate on, from data/x.jsonl, 2 left out (over data.max_val_rows), "
        "4 left out (prompt too long), too few to measure with ("
    ) in outcome.out
    assert "a model was loaded" in outcome.err


def test_as_a_shell_sees_it(workplace: Workplace) -> None:
    (workplace.folder / "data" / "sft_train.jsonl").write_bytes(GOOD + b"{")
    (workplace.folder / "outputs").mkdir()
    command = [*MODULE, "stage=sft", "data=files"]
    outcome = workplace.process(command, f"{KEY}=data/sft_train.jsonl")
    assert "data/sft_train.jsonl, line 2: broken JSON" in outcome.error
    assert outcome.out == "computing on the CPU, 32-true\n"
    assert list((workplace.folder / "outputs").iterdir()) == []
