from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from matplotlib.image import imread

from lightning_rlhf.data.problems import find_problems
from lightning_rlhf.data.rows import Message, Preference, Rows
from lightning_rlhf.report.fitness import ScoredProbe, measure_probes
from lightning_rlhf.report.fitness_page import FitnessReport
from lightning_rlhf.report.tables import plain, table

from .pairs import measure, pair, simulated

HARD = [
    "a | b", "a\\|b", "ends with \\", "`code` ``|``", "two\nlines\r\nand\ttab", "*bold* _it_ ~~s~~",
    "<script>&amp;</script>", "[link](http://x.y) ![i](j)", "# no heading", "$x$ | $y$", "| --- |",
]  # fmt: skip


def parse(markdown: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(markdown)


def shown(token: Token) -> str:
    """The text a reader sees; anything but text and our own emphasis fails."""
    assert {child.type for child in token.children or []} <= {
        "text", "text_special", "strong_open", "strong_close", "em_open", "em_close",
    }  # fmt: skip
    return "".join(child.content for child in token.children or [])


def tables(markdown: str) -> list[list[list[str]]]:
    found: list[list[list[str]]] = []
    before = ""
    for token in parse(markdown):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and before in ("th_open", "td_open"):
            found[-1][-1].append(shown(token))
        before = token.type
    return found


def write(folder: Path, count: int, texts: list[str], **changes: Any) -> dict[str, Any]:
    """The page as text, and the numbers, pictures and verdicts."""
    pairs = simulated(count, per_token=0.05)
    probed = [pair(prompt=text, chosen=text, chosen_score=float(i)) for i, text in enumerate(texts)]
    probes = [
        ScoredProbe(kind=kind, response=p.prompt, score=5.0, pair=p)
        for kind in ("repeated", "flattery") for p in probed
    ]  # fmt: skip
    rows = [Preference((Message("user", text),), text, "bad") for text in texts]
    values: dict[str, Any] = {
        "title": "run | *one*",
        "fitness": measure(pairs, [(0.5, 7)] * 3),
        "probes": measure_probes(probes),
        "problems": find_problems(
            Rows("v", (*rows, *rows), Counter(), "line", tuple(range(2 * len(rows)))), None
        ),
        "sampled_from": "some prompts",
        "scale": "Raw scores.",
    }
    report = FitnessReport(**(values | changes))
    folder.mkdir(parents=True, exist_ok=True)
    pictures = report.write(folder)
    page = (folder / "report.md").read_text(encoding="utf-8")
    return {"page": page, "metrics": report.metrics, "pictures": pictures, "words": report.words}


@pytest.mark.parametrize("text", HARD)
def test_hard_texts_stay_in_their_cells_and_read_as_they_are(text: str) -> None:
    ((heading, *rows),) = tables(table(("text", "n"), [(plain(text, 80), "1")] * 2, right=[1]))
    assert heading == ["text", "n"]
    assert rows == [[" ".join(text.split()), "1"]] * 2


@pytest.mark.parametrize("count", [1, 200])
def test_the_page_of_any_number_of_pairs(count: int, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "final"
    written = write(folder, count, HARD)
    page = written["page"]
    links = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page)
    assert {folder / link for link in links} == set(written["pictures"].values())
    drawn = sorted(path.name for path in (folder / "report").iterdir())
    assert drawn == ["length.png", "rewards.png"]
    assert all(imread(path).shape[1] >= 1000 for path in written["pictures"].values())
    assert all(len(row) == len(rows[0]) for rows in tables(page) for row in rows)
    assert all(f"**{name}**" in page for name in ("ECE", "Length gap", "Beats chosen"))
    assert "fewer than 30 pairs or samples" in page
    assert "{" not in page
    assert page.index(written["words"][0][:20]) < page.index("## Pictures")


def test_the_page_says_what_was_measured(tmp_path: Path) -> None:
    written = write(tmp_path, 200, HARD)
    page = written["page"]
    cells = {row[0]: row[1:] for rows in tables(page) for row in rows}
    assert (
        cells["Accuracy (200 pairs)"][0] == f"{measure(simulated(200, 0.05)).accuracy.accuracy:.3f}"
    )
    assert cells["length gap"][0] == "flag"
    assert cells["probe repeated"][0] == "clear"  # median 5, as that of scores 0 to 10
    assert cells["flattery"] == ["a | b", "a | b", "5.000", "0.000"]
    assert "3 SFT samples" in page
    assert "says to some prompts. Raw scores." in page
    before, after = page.split("## What this means for PPO")[1].split("Good responses are", 1)
    assert "watch `rollout/response_tokens`" in before  # its scores grow with length
    assert "held-out pairs, and their score is the median" in after
    assert "duplicates of an earlier pair: 11 of 22 pairs" in page
    assert not re.search(r"\bnan\b|\bNone\b", page)


def test_numbers_for_machines(tmp_path: Path) -> None:
    written = write(tmp_path, 40, HARD)
    content = json.loads((tmp_path / "fitness.json").read_text(encoding="utf-8"))
    assert content["title"] == "run | *one*"
    assert [content["verdict"], content["about_pairs"]] == written["words"]
    assert content["findings"][-1]["subject"] == "one-sided length"
    assert content["metrics"] == written["metrics"]
    assert content["fitness"]["accuracy"]["pairs"] == 40
    assert "samples" not in content["fitness"]
    assert content["findings"][0]["check"]["threshold"] == 0.5
    assert content["probes"][0]["kind"] == "repeated"
    assert content["problems"]["duplicates"]["count"] == 11
