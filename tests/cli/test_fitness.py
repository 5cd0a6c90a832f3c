"""The probes of a fitness report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.evaluation.evaluate_reward import shortened

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
