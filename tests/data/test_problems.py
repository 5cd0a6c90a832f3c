from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from lightning_rlhf.data.problems import find_problems, length_share
from lightning_rlhf.data.readers import read
from lightning_rlhf.data.rows import Message, Preference, Rows

read_preferences: Any = partial(read, "preferences")


def pair(prompt: str, chosen: str, rejected: str) -> Preference:
    return Preference((Message("user", prompt),), chosen, rejected)


def rows(*pairs: Preference, **left_out: int) -> Rows[Preference]:
    return Rows("source", pairs, Counter(left_out), "line", tuple(range(len(pairs))))


def test_repeated_and_contradicting_pairs_over_both_sides() -> None:
    train = rows(pair("a?", "x", "y"), pair("a?", "x", "z"), pair("a?", " x\n", "y"))
    held_out = rows(pair("a?", "y", "x"), pair("b?", "y", "x"), pair("a?", "x", "y"))
    found = find_problems(held_out, train)
    duplicates, contradictions = found.counted["duplicates"], found.counted["contradictions"]
    assert duplicates.count == 2
    assert duplicates.examples == (
        "training row 3 and training row 1: a?", "held-out row 3 and training row 1: a?",
    )  # fmt: skip
    # Row 1 against the training pairs; and row 3, the other way round, against row 1.
    assert contradictions.examples[0] == "held-out row 1 and training row 1: a?"
    assert "2 of 6 pairs" in contradictions.line


def test_prompts_on_both_sides_are_counted_once() -> None:
    train = rows(pair("a?", "x", "y"), pair("b?", "x", "y"))
    held_out = rows(pair("c?", "1", "2"), pair("b?", "1", "2"), pair("b?", "3", "4"))
    found = find_problems(held_out, train).counted["leaks"]
    assert (found.count, found.of, found.examples) == (1, 2, ("held-out row 2: b?",))
    assert "leaks" not in find_problems(held_out, None).counted


def test_one_response_for_many_prompts() -> None:
    many = [pair(f"{i}?", "Good question!", f"{i}") for i in range(5)]
    again = pair("0?", "Good question!", "no")
    few = [pair(f"{i}?", "It depends.", f"{i}") for i in range(4)]
    found = find_problems(rows(*few, *few, *many, again), None).counted["one_for_many"]
    assert (found.count, found.of) == (6, 14)
    assert found.examples == ("chosen for 5 prompts, first in held-out row 9: Good question!",)


def test_rows_left_out_as_identical_are_reported(jsonl: Callable[..., str]) -> None:
    path = jsonl(
        {"prompt": "a", "chosen": "x", "rejected": "x"},
        {"prompt": "a", "chosen": "x"},
        {"prompt": "a", "chosen": "x", "rejected": "y"},
    )
    read = read_preferences(path, "skip")
    found = find_problems(replace(read, left_out=Counter()), read).counted["identical"]
    assert (found.count, found.of) == (1, 4)  # read once with, once without what was left out


@pytest.mark.parametrize(
    ("longer", "shorter", "share", "rule"),
    [  # 60 of 100: Wilson's interval begins at 0.502; 7 of 10 at 0.397
        (60, 240, "20.0% of the 300", "taking the shorter response is right in 80.0%, whatever"),
        (60, 40, "60.0% of the 100", "taking the longer response is right in 60.0%, whatever"),
        (7, 3, "70.0% of the 10", None),
        (5900, 4100, "59.0% of the 10,000", None),  # no rule, however sure
    ],
)
def test_length_alone(longer: int, shorter: int, share: str, rule: str | None) -> None:
    """Shares are of the pairs of different lengths."""
    pairs = [pair("a", "long", "s")] * longer + [pair("a", "s", "long")] * shorter
    found = length_share([*pairs, pair("a", "1", "2")])
    assert (found.longer, found.shorter, found.same) == (longer, shorter, 1)
    assert found.one_sided is (rule is not None)
    assert found.line.startswith(f"length: chosen is longer in {share} pairs")
    assert (rule or "95% interval") in found.line
    assert ("whatever it says" in found.line) is found.one_sided


def test_wilsons_interval_by_hand() -> None:
    found = length_share([pair("a", "long", "s")] * 9 + [pair("a", "s", "long")])
    # p = 0.9, n = 10, z^2 = 3.8416: (0.9 + 0.19208 -+ 1.96 sqrt(0.009 + 0.009604)) / 1.38416
    assert found.interval == pytest.approx((0.595846, 0.982125), abs=1e-5)
    none = length_share([pair("a", "1", "2")])
    assert (none.share, none.interval, none.one_sided) == (None, None, False)
