"""report.html: one self-contained page about a run, or about all stages of a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lightning_rlhf.core.metrics import heading_of
from lightning_rlhf.io.console import visible
from lightning_rlhf.report.conclusion import LEVELS, Evaluated, Level, Verdict
from lightning_rlhf.report.estimates import Interval
from lightning_rlhf.report.plots import Plot, color_class, draw
from lightning_rlhf.report.tables import BLUE, GREEN, ORANGE, RED, colour, marked, scale, signed

TEMPLATES = Path(__file__).parent / "templates"
MOST_TOKENS = 400
"""Largest number of tokens that are shown of a response."""
CHARACTERS = 2000
"""Largest number of characters of a text that is shown."""
MARKS: Mapping[Level, str] = {"good": "✓", "doubtful": "!", "bad": "✗", "unknown": "–"}
"""Sign of each level of a verdict, which is readable without colour."""
WORDS: Mapping[Level, str] = {level: level for level in LEVELS} | {"unknown": "not judged"}
"""Name of each level."""


Kept = Literal["kept", "within noise", "broken"]
KEPT: Mapping[Kept, Level] = {"kept": "good", "within noise": "doubtful", "broken": "bad"}
"""Verdict on a promise of a recipe -> its level."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token of a sampled response."""

    text: str
    kl: float
    """Log-probability of the policy less that of the reference, nats."""
    advantage: float


@dataclass(frozen=True, kw_only=True)
class TokenSample:
    """A training response token by token."""

    heading: str
    prompt: str
    tokens: Sequence[Token]


@dataclass(frozen=True, kw_only=True)
class PairedSample:
    """Responses to the same held-out prompt at the first and at the last evaluation."""

    prompt: str
    before: str
    before_numbers: str
    after: str
    after_numbers: str


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of texts."""

    title: str
    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """All that a page says about one run of a stage."""

    name: str
    """Name of the run: run/model/stage."""
    title: str
    verdict: Verdict
    curves: Sequence[Plot] = ()
    fan: Plot | None = None
    frontiers: Sequence[Plot] = ()
    frontier_note: str = ""
    """Sentence on diminishing returns."""
    evaluated: Sequence[Evaluated] = ()
    tables: Sequence[TextTable] = ()
    """Further tables of an evaluation."""
    pairs: Sequence[PairedSample] = ()
    samples: Sequence[TokenSample] = ()
    findings: Sequence[Mapping[str, Any]] | None = None
    """Findings of the diagnosis; None where there was none."""
    phases: Sequence[tuple[str, float]] = ()
    """Phase of the run -> its seconds."""
    totals: Sequence[tuple[str, str]] = ()
    """Compute of the run, as names and amounts."""
    config: Sequence[tuple[str, str]] = ()
    """Keys of the configuration and their values as text."""
    data: Sequence[tuple[str, str]] = ()
    """Keys of the section `data` and their values as text."""
    versions: Sequence[tuple[str, str]] = ()
    """Packages, parents and other origins."""


@dataclass(frozen=True, kw_only=True)
class PromiseRow:
    """A promise of a recipe and what was measured, as text."""

    stage: str
    metric: str
    promised: str
    measured: str
    verdict: Kept

    @property
    def level(self) -> Level:
        """Return the level of the verdict."""
        return KEPT[self.verdict]


def write_page(path: Path, title: str, stages: Sequence[StageReport],
               promises: Sequence[PromiseRow] = ()) -> None:  # fmt: skip
    """Write the page to `path`, beside which the caller keeps the previous one."""
    level = max((stage.verdict.level for stage in stages), key=LEVELS.index, default="unknown")
    page = (
        environment()
        .get_template("run.html")
        .render(title=title, stages=stages, promises=promises, level=level)
    )
    path.write_text(page, encoding="utf-8")


@cache
def environment() -> Environment:
    """Return the templates; every value is escaped, with its hidden characters shown."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {
        "draw": draw, "marks": MARKS, "words": WORDS, "change": change, "cells": cells,
        "tokens": token_spans, "token_rows": token_rows,
        "heading_of": heading_of, "shares": shares, "patch": patch, "color_class": color_class,
        "colors": {"above": GREEN, "below": RED, "rose": ORANGE, "fell": BLUE},
    }  # fmt: skip
    found.filters |= {
        "cut": cut,
        "marked": marked,
        "duration": duration,
        "clauses": clauses,
        "breakable": breakable,
    }
    return found


def shown(value: Any) -> Any:
    """Return a text with its hidden characters visible; markup as it is."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def cut(text: str, characters: int = CHARACTERS) -> str:
    """Return a text of at most so many characters."""
    return text if len(text) <= characters else text[: characters - 1] + "…"


def breakable(name: str) -> Markup:
    """Return a path that may be broken into lines behind each slash."""
    return Markup("/<wbr>").join(shown(part) for part in name.split("/"))


def cells(row: Sequence[str]) -> Markup:
    """Return the cells of a row; an interval may stand below its value on a narrow screen."""
    split = (shown(cut(cell)).partition(" [") for cell in row)
    return Markup("").join(
        Markup("<td>{}{}</td>").format(
            value, Markup(' <span class="interval">[{}</span>').format(rest) if bracket else ""
        )
        for value, bracket, rest in split
    )


def change(one: Evaluated) -> list[str]:
    """Return the cells of a metric: before, after with its interval, gain with its interval."""
    digits = _decimals(one.value, one.interval)
    gain = "-"
    if one.gain is not None:
        narrow = one.gain_interval is not None
        of_gain = max(digits, _decimals(one.gain, one.gain_interval)) if narrow else digits
        gain = f"{one.gain:+z.{of_gain}f}{_interval(one.gain_interval, of_gain)}"
    return [
        "-" if one.before is None else f"{one.before:z.{digits}f}",
        f"{one.value:z.{digits}f}{_interval(one.interval, digits)}",
        gain,
    ]


def clauses(words: str) -> list[str]:
    """Return the parts of a verdict, each as a sentence."""
    parts = (part.strip().rstrip(".") for part in words.split(";"))
    return [f"{part[:1].upper()}{part[1:]}." for part in parts if part]


def shares(phases: Sequence[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """Return name, seconds and share of each phase."""
    total = sum(seconds for _, seconds in phases) or 1.0
    return [(name, seconds, seconds / total) for name, seconds in phases]


def duration(seconds: float) -> str:
    """Return seconds as text: "12.3 s", "4.5 min" or "3.2 h"."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def patch(color: str) -> Markup:
    """Return a patch of a token's colour."""
    return Markup(f'<span class="patch" style="background: rgb({color} / .55)"></span>')


def token_spans(samples: Sequence[TokenSample], index: int) -> list[tuple[str, str, str]]:
    """Return text, style and title of each token of a sample, coloured on one scale for all."""
    tokens = [token for sample in samples for token in sample.tokens]
    advantage = scale([token.advantage for token in tokens])
    kl = scale([token.kl for token in tokens])
    return [
        (
            marked(token.text),
            f"--advantage: {colour(token.advantage / advantage, GREEN, RED)}; "
            f"--kl: {colour(token.kl / kl, ORANGE, BLUE)}",
            "\n".join(map(" ".join, zip(("token", "advantage", "KL"), cells, strict=True))),
        )
        for token, cells in zip(samples[index].tokens, token_rows(samples[index]), strict=False)
    ]


def token_rows(sample: TokenSample) -> list[tuple[str, str, str]]:
    """Return text, advantage and KL of each token that is shown."""
    return [
        (repr(token.text), signed(token.advantage), f"{token.kl:+z.4f}")
        for token in sample.tokens[:MOST_TOKENS]
    ]


def _decimals(value: float, interval: Interval | None) -> int:
    """Return the decimals that show two digits of half an interval; without one, three of value."""
    if interval is None:
        size, digits = abs(value), 3
    else:
        size, digits = (interval[1] - interval[0]) / 2, 2
    if not 0 < size < math.inf:
        return 3
    return min(max(digits - 1 - math.floor(math.log10(size)), 0), 4)


def _interval(found: Interval | None, decimals: int) -> str:
    return "" if found is None else f" [{found[0]:z.{decimals}f}, {found[1]:z.{decimals}f}]"
