"""Scores of here beside scores of there, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.rewards.format_check import (
    FLATTERY,
    PROBES,
    REFUSAL,
    FormatResult,
    KnownPair,
    Probe,
    make_probes,
    ranked_backwards,
    read_pairs,
    write_pairs,
)


def known(chosen: float, rejected: float, rendered: str = "<q>a<r>b<e>") -> KnownPair:
    row = {"prompt": "é\n", "messages": [{"role": "user", "content": "é\n"}]}
    scores = {"chosen_score": chosen, "rejected_score": rejected}
    return KnownPair(row=row, chosen="b", rejected="c", rendered=rendered, **scores)


def test_the_gap_is_in_deviations_of_its_own_scores() -> None:
    # Own scores 3, 1, 2, 6: mean 3, squares 0, 4, 1, 9, population deviation sqrt(14 / 4).
    # Here 3, 2, 4, 6: squared differences 0, 1, 4, 0, their mean 5 / 4; the root of 5 / 14.
    pairs = [known(3, 1), known(2, 6)]
    result = FormatResult(pairs, [3, 4], [2, 6], "<q>a<r>b<e>", ())
    assert "0.50 of them ranked as labelled, 0.50 in" in result.lines("a", 1, shows_text=False)[0]
    assert result.fits(0.598)  # the root of 5 / 14 is 0.59761
    assert not result.fits(0.597)
    assert not replace(result, problems=["odd"]).fits(1)
    assert not replace(result, chosen=[math.nan, 4]).fits(1)
    assert replace(result, known=(), problems=()).fits(0)
    assert result.gap == pytest.approx(math.sqrt(5 / 14), rel=1e-12)
    assert result.rendered == result.own_rendered


def ranked(right: int, wrong: int, ties: int = 0) -> list[str]:
    chosen = [1.0] * right + [0.0] * (wrong + ties)
    return ranked_backwards(chosen, [0.5] * (right + wrong) + [0.0] * ties)


def test_pairs_that_are_ranked_backwards() -> None:
    for ties in (0, 5):  # which say neither
        (line,) = ranked(2, 14, ties)
        assert line.startswith("it ranks 2 pairs as labelled and 14 the other way ")
        assert "with probability 0.0021: " in line  # (1 + 16 + 120) / 2^16 = 137 / 65536
    # Guessing may rank so: 137 + 560 of 65536: 0.0106; 1 / 2^6: 0.016
    assert ranked(3, 13) == ranked(0, 6, 10) == []


def test_another_text_is_shown_beside_its_own() -> None:
    # Own deviation of 1 and 0: 0.5; differences 1 and 0, root of 1 / 2: 1.41421 of it.
    result = FormatResult([known(1, 0)], [2], [0], "<q>a\n<r>b<e>", ["odd"])
    lines = result.lines("a", 0.1, shows_text=True)
    assert not result.fits(1e9)
    assert "differ by 1.414 of" in lines[0]
    assert lines[1:] == [
        "  text of a pair there: '<q>a<r>b<e>'", "  text of a pair here:  '<q>a\\n<r>b<e>'",
        "  first difference: at character 4, '<q>a<r>b<e>' there, '<q>a\\n<r>b<e>' here", "  odd",
    ]  # fmt: skip


def test_pairs_are_read_as_they_were_written(tmp_path: Path) -> None:
    pairs = [known(0.1, -1e-9, "é\u2028\n"), known(2, 1)]
    write_pairs(tmp_path, pairs)
    assert read_pairs(tmp_path) == pairs
    for line in ("{", '{"row": {}}'):
        (tmp_path / "pairs.jsonl").write_text(line + "\n")
        with pytest.raises(CheckpointError, match=r"pairs\.jsonl is damaged: "):
            read_pairs(tmp_path)


ROW = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"},
                    {"role": "user", "content": "what is\na cat?"}]}  # fmt: skip


def test_a_probe_of_every_kind_for_every_row() -> None:
    probes = make_probes([ROW, ROW], ["A cat  is\nan animal.", "It purrs."])
    assert probes[:6] == [
        Probe("empty", 0, ""),
        Probe("repeated", 0, "\n".join(["A cat  is\nan animal."] * 4)),
        Probe("truncated", 0, "A cat"),  # two words of five
        Probe("prompt_copied", 0, "what is\na cat?"),
        Probe("flattery", 0, FLATTERY),
        Probe("refusal", 0, REFUSAL),
    ]
    assert [probe.kind for probe in probes[6:]] == list(PROBES)
    assert {probe.row for probe in probes[6:]} == {1}
    assert probes[8].response == "It"
