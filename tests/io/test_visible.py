"""Foreign text is shown as what it is, and obeyed by no terminal."""

import json
import sys

import pytest

from lightning_rlhf.io.console import is_hidden, json_line, visible, visible_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢字 [red]", "plain é 漢字 [red]"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b2J\x7f", "\\x9b2J\\x7f"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("a\nb", "a\nb"),
        ("no\xa0break \u200d joined", "no\xa0break \u200d joined"),
    ],
)
def test_what_a_terminal_would_obey_or_hide_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible_line(text) == shown.replace("\n", "\\n")


def test_nothing_hidden_is_left_of_all_characters() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert not any(map(is_hidden, visible_line(every)))
    visible(every).encode()  # halves of surrogate pairs too


def test_json_keeps_what_it_escapes() -> None:
    value = {"a\x9b": "\x1b \u202e \ud800 \U000e0041 é\n"}
    line = json_line(value)
    assert json.loads(line) == value
    assert not any(map(is_hidden, line))
    assert "é" in line
