"""What a fitness report and a format check make of what they find."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.evaluation.evaluate_reward import format_advice, shortened
from lightning_rlhf.rewards.format_check import FormatResult

CHAT: Any = SimpleNamespace(
    response_tokens=lambda text: [*text.split(), "end"],
    show=lambda tokens: " ".join(tokens),
)
"""A word is a token."""


@pytest.mark.parametrize(
    ("text", "longest", "expected"),
    [("a b c", 4, "a b c"), ("a b c", 3, "a b"), ("a b c", 1, ""), ("", 1, "")],
)
def test_a_probe_is_cut_where_no_response_could_go_on(
    text: str, longest: int, expected: str
) -> None:
    """The end token is one of the `longest`."""
    assert shortened(text, CHAT, longest) == expected


def test_advice_tells_other_text_from_other_numbers() -> None:
    same = FormatResult(
        pairs=16, accuracy=0.5, own_accuracy=0.9, gap=0.7, rendered="a", own_rendered="a",
        problems=(), doubts=(),
    )  # fmt: skip
    assert format_advice(same, "reward") == (
        "The text is the same: its numbers differ by dtype or quantization. "
        "reward.format_check=warn goes on all the same"
    )
    for other in (replace(same, rendered="b"), replace(same, problems=("twice",))):
        assert format_advice(other, "reward").startswith("It would be asked about other text than")
    unknown = replace(same, gap=None, own_rendered=None, problems=("twice",))
    assert format_advice(unknown, "reward.components.a") == (
        "Mend that; or reward.components.a.format_check=warn goes on all the same"
    )
