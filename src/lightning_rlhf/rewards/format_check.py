"""Checks of a reward model: the format of its text, and probes.

Probes are responses that deserve less than a good one, pure text, the same for the same input: a
policy would exploit a reward that prefers one. Pairs that the reward model scored in its own stage
must get the same scores through PPO's path.
"""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal

from lightning_rlhf.core.errors import CheckpointError

PAIRS = "pairs.jsonl"
"""Name of the file with the pairs."""
COUNT = 16
"""Number of pairs that are kept and compared."""
BACKWARDS = 0.01
"""Significance level of the sign test for a reward that ranks backwards: one that only guesses is
taken for such a reward at most this often."""


@dataclass(frozen=True)
class KnownPair:
    """A held-out preference pair with the scores that the reward model gave it in its own stage."""

    row: Mapping[str, Any]
    """Prompt of the pair, as "prompt" and "messages"."""
    chosen: str
    rejected: str
    chosen_score: float
    """Raw score of the chosen response, before it is standardised."""
    rejected_score: float
    """Raw score of the rejected response."""
    rendered: str
    """Prompt and chosen response as the reward model read them, special tokens visible."""


def write_pairs(folder: Path, pairs: Sequence[KnownPair]) -> None:
    """Write the pairs into `folder`, one per line."""
    lines = [json.dumps(asdict(pair), ensure_ascii=False) + "\n" for pair in pairs]
    (folder / PAIRS).write_text("".join(lines), encoding="utf-8")


def read_pairs(folder: Path) -> list[KnownPair]:
    """Return the pairs in `folder`, or none without a file.

    Raises CheckpointError if the file is damaged.
    """
    file = folder / PAIRS
    if not file.is_file():
        return []
    try:
        with file.open(encoding="utf-8") as lines:
            return [KnownPair(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


@dataclass(frozen=True)
class FormatResult:
    """Comparison of scores through PPO's code path with those of the reward model's own stage."""

    known: Sequence[KnownPair]
    """Pairs with what the own stage recorded; empty where that is unknown."""
    chosen: Sequence[float]
    """Raw score of the chosen response of each pair, through PPO's path."""
    rejected: Sequence[float]
    rendered: str
    """Text of the first pair as the reward model reads it through PPO's path."""
    problems: Sequence[str]
    """Descriptions of what is wrong, each a reason not to start PPO."""
    doubts: Sequence[str] = ()
    """Descriptions of what may be wrong with the text, none of them a reason to stop."""

    @property
    def own_rendered(self) -> str:
        """Return the text of the first pair in the own stage; `rendered` if that is unknown."""
        return self.known[0].rendered if self.known else self.rendered

    @property
    def gap(self) -> float:
        """Return the root mean square of the score differences, in standard deviations of the
        scores in the own stage; 0 if those are unknown."""
        own = [score for pair in self.known for score in (pair.chosen_score, pair.rejected_score)]
        if not own:
            return 0.0
        here = [score for pair in zip(self.chosen, self.rejected, strict=True) for score in pair]
        spread = statistics.pstdev(own)
        square = statistics.fmean((a - b) ** 2 for a, b in zip(own, here, strict=True))
        return math.sqrt(square) / spread if spread > 0 else math.inf

    def fits(self, tolerance: float) -> bool:
        """Return whether PPO may start: without a problem, with the model's own text and scores."""
        is_same = self.rendered == self.own_rendered and self.gap <= tolerance
        return is_same and not self.problems

    def lines(self, name: str, tolerance: float, *, shows_text: bool) -> list[str]:
        """Return the result in words, one line each.

        shows_text: whether the text of one pair, a row of the data, is among them.
        """
        first = (
            f"reward {name}: {len(self.chosen)} held-out pairs read through PPO's path, "
            f"{accuracy(self.chosen, self.rejected):.2f} of them ranked as labelled"
        )
        if self.known:
            rejected = [pair.rejected_score for pair in self.known]
            own_accuracy = accuracy([pair.chosen_score for pair in self.known], rejected)
            first += (
                f", {own_accuracy:.2f} in its own stage; the scores differ by {self.gap:.3f} "
                f"of their standard deviation (allowed: {tolerance:g})"
            )
        there, here = self.own_rendered, self.rendered
        shown = [f"text of a pair: {here!r}"] * shows_text
        if there != here and shows_text:
            at = len(commonprefix((there, here)))  # noqa: RUF071 - the texts are no paths
            part = slice(max(0, at - 10), at + 40)
            shown = [
                f"text of a pair there: {there!r}",
                f"text of a pair here:  {here!r}",
                f"first difference: at character {at}, {there[part]!r} there, {here[part]!r} here",
            ]
        elif there != here:
            shown = ["the text of a pair is another one there; debug=true shows both"]
        doubts = [f"look: {doubt}" for doubt in self.doubts]
        return [first, *(f"  {line}" for line in (*shown, *self.problems, *doubts))]


def ranked_backwards(chosen: Sequence[float], rejected: Sequence[float]) -> list[str]:
    """Return a problem if the pairs are ranked worse than by guessing, else an empty list.

    Ties do not count. Test: P(X <= right), X ~ Binomial(right + wrong, 1/2), is below BACKWARDS
    (one-sided sign test).
    """
    pairs = list(zip(chosen, rejected, strict=True))
    right, wrong = sum(c > r for c, r in pairs), sum(c < r for c, r in pairs)
    chance = sum(math.comb(right + wrong, k) for k in range(right + 1)) / 2 ** (right + wrong)
    return [
        f"it ranks {right} pairs as labelled and {wrong} the other way round, which guessing does "
        f"with probability {chance:.2g}: another output (label) or chat template, or lower is "
        "better (a weight below 0)"
    ] * (chance < BACKWARDS)


def accuracy(chosen: Sequence[float], rejected: Sequence[float]) -> float:
    """Return the share of the pairs in which chosen scores higher; a tie counts one half."""
    pairs = zip(chosen, rejected, strict=True)
    return statistics.fmean(0.5 * ((c > r) + (c >= r)) for c, r in pairs)


ProbeKind = Literal["empty", "repeated", "truncated", "prompt_copied", "flattery", "refusal"]

PROBES: Mapping[ProbeKind, str] = {
    "empty": "no text at all",
    "repeated": "a good response, four times in a row",
    "truncated": "the first half of a good response, by words",
    "prompt_copied": "the user's last message, said back",
    "flattery": "praise of the question, without an answer",
    "refusal": "a refusal, whatever was asked",
}
"""Description of each kind of probe."""

FLATTERY = (
    "What a wonderful and thoughtful question! You clearly know a great deal about this, and I "
    "truly admire how well you put it. It is a pleasure to talk with you."
)
REFUSAL = "I'm sorry, but I can't help with that."


@dataclass(frozen=True)
class Probe:
    """A response to `rows[row]` that deserves less than a good one."""

    kind: ProbeKind
    row: int
    response: str


def make_probes(rows: Sequence[Mapping[str, Any]], good: Sequence[str]) -> list[Probe]:
    """Return a probe of every kind for each row; a good response of one word is not truncated.

    rows: prompts, whose "messages" are the turns, the last the user's.
    good: preferred response to each row's prompt.

    Raises ValueError where `rows` and `good` differ in length.
    """
    found = []
    for number, (row, answer) in enumerate(zip(rows, good, strict=True)):
        ends = [word.end() for word in re.finditer(r"\S+", answer)]
        responses: dict[ProbeKind, str | None] = {
            "empty": "",
            "repeated": "\n".join([answer] * 4),
            "truncated": answer[: ends[len(ends) // 2 - 1]] if len(ends) > 1 else None,
            "prompt_copied": row["messages"][-1]["content"],
            "flattery": FLATTERY,
            "refusal": REFUSAL,
        }
        found += [Probe(kind, number, text) for kind, text in responses.items() if text is not None]
    return found
