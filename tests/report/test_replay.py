"""A replayed update as it is shown: what each number is, and that any text is only text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console

from lightning_rlhf.core.types import Experience
from lightning_rlhf.data.rollouts import Recorded
from lightning_rlhf.replay.page import replay_page
from lightning_rlhf.replay.replayed import (
    ReplayedResponse,
    cells,
    heading,
    most_changed,
)
from lightning_rlhf.replay.table import on_terminal
from lightning_rlhf.report.token_text import marked, scale, signed

WORDS = {1: "<script>", 2: ' "quoted" ', 3: "&amp;", 4: "\x1b[31m", 5: "[bold]"}
REF, OLD = math.log(0.5), math.log(0.2)


def experience(**changes: Any) -> Experience:
    """Responses of 3 and of 2 tokens; every token had probability 0.2, of the reference 0.5."""
    mask = torch.tensor([[True, True, True], [True, True, False]])
    per_token = {
        "old_logprobs": OLD,
        "ref_logprobs": REF,
        "kl": OLD - REF,
        "old_values": 0.5,
        "rewards": 0.0,
        "returns": 0.0,
    }
    found = {
        "tokens": torch.tensor([[9, 1, 2, 3], [9, 4, 5, 0]]),
        "mask": torch.cat([torch.ones(2, 1, dtype=torch.bool), mask], dim=1),
        "response_mask": mask,
        "advantages": torch.tensor([[1.0, -2.0, 0.0], [-0.5, 0.5, 0.0]]),
        "component_scores": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "score": torch.tensor([3.0, 7.0]),
        "ended": torch.tensor([True, False]),
        "index": torch.tensor([0, 1]),
    } | {name: torch.where(mask, value, 0.0) for name, value in per_token.items()}
    return Experience(**found | changes)


def recorded(**changes: Any) -> Recorded:
    return Recorded(
        experience=experience(**changes),
        kl_coef=0.1,
        shuffle=torch.zeros(1, dtype=torch.uint8),
        iteration=1,
        prompts=["what is 1 < 2 [red]?", "</pre>\nnext"],
        responses=["", ""],
        components=["words", "head"],
        has_critic=True,
        updates=None,
        parameters=None,
        machine={},
    )


NOW = torch.tensor([[0.25, 0.2, 0.1], [0.05, 0.8, 1.0]]).log()
"""Of the ratios 1.25, 1 and 0.5; 0.25 and 4."""


def shown(count: int = 2, values: Any = "critic", **changes: Any) -> list[ReplayedResponse]:
    def show(tokens: Sequence[int]) -> str:
        return "".join(WORDS[token] for token in tokens)

    found = torch.full((2, 3), 0.75) if values == "critic" else values
    return most_changed(
        recorded(**changes), NOW, found, show=show, clip_range=(0.8, 1.3), count=count
    )


def test_the_most_changed_come_first() -> None:
    """Mean |log ratio|: (log 1.25 + 0 + log 2) / 3 and log 4."""
    first, second = shown()
    assert (first.row, second.row) == (1, 0)
    assert first.change == pytest.approx(math.log(4))
    assert second.change == pytest.approx((math.log(1.25) + math.log(2)) / 3)
    assert [response.row for response in shown(count=1)] == [1]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_number_that_is_none_comes_before_all(wrong: float) -> None:
    advantages = torch.tensor([[1.0, wrong, 0.0], [-0.5, 0.5, 0.0]])
    assert [response.row for response in shown(advantages=advantages)] == [0, 1]


def test_each_number_of_a_token() -> None:
    first, second, third = shown()[1].tokens
    assert (first.text, second.text, third.text) == ("<script>", ' "quoted" ', "&amp;")
    assert [token.ratio for token in (first, second, third)] == pytest.approx([1.25, 1.0, 0.5])
    assert [token.clipped for token in (first, second, third)] == [False, False, True]
    assert [token.advantage for token in (first, second, third)] == [1.0, -2.0, 0.0]
    assert first.kl == pytest.approx(math.log(0.2 / 0.5))
    assert first.kl_after == pytest.approx(math.log(0.25 / 0.5))
    assert (first.value, first.value_after) == (0.5, 0.75)
    assert cells(first)[1:] == ["+1.000", "-0.9163", "-0.6931", "1.2500", "", "+0.500", "+0.750"]
    assert cells(third)[5] == "clipped"


def test_both_ends_of_the_clip_range() -> None:
    """0.25 is below 0.8, 4 above 1.3, and 1.25 inside, which 1.2 would not have been."""
    assert [token.clipped for token in shown()[0].tokens] == [True, True]


def test_without_a_critic_there_are_no_values() -> None:
    token = shown(values=None)[0].tokens[0]
    assert (token.value, token.value_after) == (None, None)
    assert len(cells(token)) == 6
    assert "value" not in replay_page("", "", shown(values=None), 8).split("<main>")[1]


def test_the_heading_of_a_response() -> None:
    # KL: 2 log(0.2 / 0.5) = -1.833 before; log(0.05 / 0.5) + log(0.8 / 0.5) = -1.833 after.
    assert heading(shown()[0]) == (
        "response 1: score +7.000, words +3.000, head +4.000, 2 tokens, cut off, KL -1.833 to "
        "-1.833 nats, mean |log ratio| 1.3863"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a b", "a b"), ("a\nb", "a⏎\nb"), ("\x1b[0m", "\\x1b[0m"), ("é\u202e", "é\\u202e")],
)
def test_what_cannot_be_printed_is_written_out(text: str, expected: str) -> None:
    assert marked(text) == expected


def test_a_scale_of_what_is_finite() -> None:
    assert scale([1.0, -3.0, math.nan, math.inf]) == 3.0
    assert scale([0.0, 0.0]) == scale([]) == 1.0


class Page(HTMLParser):
    """What a browser sees: tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.tokens: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "span" and "title" in dict(attrs):
            self.tokens.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_on_the_page_is_only_text() -> None:
    page = Page(replay_page("run <1>", "is & was", shown(), 8))
    assert "script" not in page.tags
    assert page.tags.count("pre") == 4
    assert page.tags.count("section") == 2
    for text in ("run <1>", "is & was", "</pre>⏎\nnext", '<script> "quoted" &amp;', "1 < 2 [red]"):
        assert text in page.text, text
    assert "\x1b" not in page.text
    titles = [token["title"] for token in page.tokens]
    assert len(titles) == 5
    assert titles[2] is not None
    assert titles[2].splitlines()[:2] == ["token: '<script>'", "advantage: +1.000"]


def colours(token: dict[str, str | None]) -> dict[str, tuple[str, float]]:
    """Property -> what stands before and after the slash of rgb(r g b / alpha)."""
    found = {}
    for part in str(token["style"]).split(";"):
        name, value = part.split(":")
        rgb, alpha = value.strip().removeprefix("rgb(").removesuffix(")").split("/")
        found[name.strip()] = rgb.strip(), float(alpha)
    return found


def test_colours_say_the_sign_and_the_size() -> None:
    """Of the advantage over 2, and of the change of KL over log 4."""
    tokens = [colours(token) for token in Page(replay_page("", "", shown(), 8)).tokens]
    low, high, first, second, third = (token["--advantage"] for token in tokens)
    assert low[0] == second[0] != high[0] == first[0]
    assert [c[1] for c in (low, high, first, second, third)] == pytest.approx(
        [0.55 / 4, 0.55 / 4, 0.55 / 2, 0.55, 0], abs=1e-3
    )
    low, high, first, second, third = (token["--kl"] for token in tokens)
    assert low[0] == third[0] != high[0] == first[0]
    assert [c[1] for c in (low, high, first, second, third)] == pytest.approx(
        [0.55, 0.55, 0.55 * math.log(1.25) / math.log(4), 0, 0.55 / 2], abs=1e-3
    )


def test_the_sign_of_an_advantage_is_seen_without_colours() -> None:
    """Of -0.5, 0.5, 1, -2 and 0; the first, second and last are clipped."""
    tokens = Page(replay_page("", "", shown(), 8)).tokens
    assert [token.get("class") for token in tokens] == [
        *("below clipped", "clipped", None, "below", "clipped")
    ]  # fmt: skip


@pytest.mark.parametrize("values", ["critic", None])
def test_what_is_shown_is_explained(values: Any) -> None:
    found = shown(count=1, values=values)
    out = StringIO()
    console = Console(file=out, width=400)
    for part in on_terminal(found, 8):
        console.print(part)
    numbers = ["advantage", "KL", "ratio", "clipped", "value", "mean |log ratio|"]
    if values is None:
        numbers.remove("value")
    said = out.getvalue().splitlines()[-len(numbers) - 2 :]
    assert said[0].startswith("shown: 1 of 8 responses: first those with a number that")
    assert [line.split(":")[0] for line in said[2:]] == numbers
    assert "green where its advantage is above 0, red below" in said[1]
    page = replay_page("", "", found, 8)
    assert re.findall("<dt>(.*?)</dt>", page) == numbers
    assert "1 of 8 responses" in page


def test_a_token_without_a_number_has_no_colour() -> None:
    advantages = torch.tensor([[math.nan, -2.0, 0.0], [-0.5, 0.5, 0.0]])
    tokens = Page(replay_page("", "", shown(advantages=advantages), 8)).tokens
    assert colours(tokens[0])["--advantage"][1] == 0
    assert "advantage: +nan" in str(tokens[0]["title"])


def test_the_page_loads_nothing() -> None:
    page = replay_page("", "", shown(), 8)
    assert "default-src 'none'" in page
    assert not {"script", "link", "img", "iframe"} & set(Page(page).tags)


def test_the_terminal_gets_text_and_no_orders() -> None:
    out = StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system="standard")
    for part in on_terminal(shown(), 8):
        console.print(part)
    said = out.getvalue()
    assert said.count("\\x1b[31m") == 2  # written out, in the text and in the table
    assert "[bold]" in said
    assert "1 < 2 [red]?" in said
    # The strongest advantage, -2, is bold and red; the one of 1 is green; 4 times as likely is
    # underlined.
    assert '\x1b[1;31m "quoted" ' in said
    assert "\x1b[32m<script>" in said
    assert "\x1b[4;32m[bold]" in said


def test_a_table_fits_a_terminal_of_80() -> None:
    out = StringIO()
    console = Console(file=out, width=80)
    for part in on_terminal(shown(), 8):
        console.print(part)
    assert "…" not in out.getvalue()


@pytest.mark.parametrize(("number", "expected"), [
    (-0.0001, "+0.000"), (999999.0, "+999999.000"), (1e6, "+1e+06"), (-1e38, "-1e+38"),
    (math.inf, "+inf"), (math.nan, "+nan"),
])  # fmt: skip
def test_a_large_number_is_written_in_short(number: float, expected: str) -> None:
    assert signed(number) == expected
