"""Does a reward model read in PPO what it read in its own stage?

A wrong separator, a doubled start token, a missing template or a lost end token changes every score
a little, and no error tells. Pairs that the reward model scored in its own stage tell: the same
text, read through the path of PPO, must get the same score.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_rlhf.core.errors import CheckpointError

PAIRS = "pairs.jsonl"
COUNT = 16
"""Pairs that are kept and compared."""
BACKWARDS = 0.01
"""So seldom may a reward that only guesses be taken for one that ranks backwards."""


@dataclass(frozen=True, kw_only=True)
class KnownPair:
    """A held-out preference pair with what the reward model said of it in its own stage."""

    row: Mapping[str, Any]
    """The prompt: "prompt" and "messages"."""
    chosen: str
    rejected: str
    chosen_score: float
    """Raw, as the other."""
    rejected_score: float
    rendered: str
    """Prompt and chosen response as it read them, special tokens visible."""


def write_pairs(folder: Path, pairs: Sequence[KnownPair]) -> None:
    """One pair a line."""
    lines = [json.dumps(asdict(pair), ensure_ascii=False) + "\n" for pair in pairs]
    (folder / PAIRS).write_text("".join(lines), encoding="utf-8")


def read_pairs(folder: Path) -> list[KnownPair]:
    """The pairs in `folder`; none where it has none. Raises CheckpointError where it is damaged."""
    file = folder / PAIRS
    if not file.is_file():
        return []
    try:
        with file.open(encoding="utf-8") as lines:
            return [KnownPair(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


@dataclass(frozen=True, kw_only=True)
class FormatResult:
    """What the reward model says of pairs through the path of PPO, beside what it said before."""

    pairs: int
    accuracy: float
    """Share of them ranked as labelled, here."""
    own_accuracy: float | None
    """In its own stage; None where nobody wrote that down."""
    gap: float | None
    """Root mean square of the differences, in standard deviations of its own scores."""
    rendered: str
    own_rendered: str | None
    problems: tuple[str, ...]
    """What is wrong by itself."""
    doubts: tuple[str, ...]
    """What may be wrong with the text, and is no reason to stop."""

    def fits(self, tolerance: float) -> bool:
        """Whether PPO may start: the text is its own, and rounding alone moves the scores."""
        if self.problems or self.gap is None:
            return not self.problems
        return self.rendered == self.own_rendered and self.gap <= tolerance

    def lines(self, name: str, tolerance: float) -> list[str]:
        """The result in words, with the text of one pair."""
        here = f"{self.accuracy:.2f} of them ranked as labelled"
        if self.gap is None:
            first = f"reward {name}: {self.pairs} held-out pairs read through PPO's path, {here}"
            more = (*self.problems, *(f"look: {doubt}" for doubt in self.doubts))
            return [first, f"  it reads: {self.rendered!r}", *(f"  {line}" for line in more)]
        first = (
            f"reward {name}: {self.pairs} held-out pairs read through PPO's path, {here}, "
            f"{self.own_accuracy:.2f} in its own stage; the scores differ by {self.gap:.3f} of "
            f"their standard deviation (allowed: {tolerance:g})"
        )
        shown = [f"  it reads: {self.rendered!r}"]
        if self.rendered != self.own_rendered:
            shown = [
                f"  it read there:  {self.own_rendered!r}",
                f"  it reads here:  {self.rendered!r}",
                f"  first difference: {first_difference(str(self.own_rendered), self.rendered)}",
            ]
        return [first, *shown, *(f"  {problem}" for problem in self.problems)]


def compare(
    known: Sequence[KnownPair],
    chosen: Sequence[float],
    rejected: Sequence[float],
    rendered: str,
    problems: Sequence[str],
) -> FormatResult:
    """What was said before against the raw scores of here; a tie counts one half."""
    own = [score for pair in known for score in (pair.chosen_score, pair.rejected_score)]
    here = [score for pair in zip(chosen, rejected, strict=True) for score in pair]
    squares = [(a - b) ** 2 for a, b in zip(own, here, strict=True)]
    spread = statistics.pstdev(own)
    return FormatResult(
        pairs=len(known),
        accuracy=accuracy(chosen, rejected),
        own_accuracy=accuracy([p.chosen_score for p in known], [p.rejected_score for p in known]),
        gap=math.sqrt(statistics.fmean(squares)) / spread if spread > 0 else math.inf,
        rendered=rendered,
        own_rendered=known[0].rendered,
        problems=tuple(problems),
        doubts=(),
    )


def unknown(
    chosen: Sequence[float],
    rejected: Sequence[float],
    rendered: str,
    problems: Sequence[str],
    doubts: Sequence[str],
) -> FormatResult:
    """The scores of here alone."""
    return FormatResult(
        pairs=len(chosen),
        accuracy=accuracy(chosen, rejected),
        own_accuracy=None,
        gap=None,
        rendered=rendered,
        own_rendered=None,
        problems=tuple(problems),
        doubts=tuple(doubts),
    )


def ranked_backwards(chosen: Sequence[float], rejected: Sequence[float]) -> list[str]:
    """What is to be said of pairs that are ranked worse than guessing would; ties say nothing.

    The one-sided sign test: P(X <= right), X ~ Binomial(right + wrong, 1/2), is below BACKWARDS.
    """
    pairs = list(zip(chosen, rejected, strict=True))
    right, wrong = sum(c > r for c, r in pairs), sum(c < r for c, r in pairs)
    n = right + wrong
    chance = sum(math.comb(n, k) for k in range(right + 1)) / 2**n
    if chance >= BACKWARDS:
        return []
    return [
        f"it ranks {right} pairs as labelled and {wrong} the other way round, which guessing does "
        f"with probability {chance:.2g}: another output (label) or chat template, or lower is "
        "better (a weight below 0)"
    ]


def accuracy(chosen: Sequence[float], rejected: Sequence[float]) -> float:
    """Share of the pairs in which chosen scores higher; a tie counts one half."""
    return statistics.fmean(
        0.5 * ((c > r) + (c >= r)) for c, r in zip(chosen, rejected, strict=True)
    )


def first_difference(there: str, here: str, characters: int = 40) -> str:
    """Where two texts part, with what follows in each."""
    at = next(
        (i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b),
        min(len(there), len(here)),
    )
    start = max(0, at - 10)
    return (
        f"at character {at}, {there[start : at + characters]!r} there, "
        f"{here[start : at + characters]!r} here"
    )
