"""Problems of preference pairs that show without a model, found in time linear in their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from scipy.stats import binomtest

from lightning_rlhf.core.errors import percent
from lightning_rlhf.data.readers import Rows
from lightning_rlhf.data.rows import IDENTICAL, Messages, Preference, prompt_text

EXAMPLES = 3
"""Maximum number of examples of each problem."""
MANY_PROMPTS = 5
"""Number of different prompts from which on a repeated chosen response is a problem, as it cannot
answer all of them."""
LONGER_SHARE = 0.6
"""Accuracy of always taking the longer response (or the shorter) from which on length alone
predicts the labels."""


@dataclass(frozen=True)
class Problem:
    """One kind of problem, with the number of its occurrences."""

    what: str
    """Description of the problem."""
    count: int
    of: int
    """Number of rows, pairs or prompts that were examined."""
    unit: str
    """Unit of `count` and `of`: "rows", "pairs" or "prompts"."""
    examples: tuple[str, ...]
    """Descriptions of the first occurrences; row numbers count the usable rows, from 1."""

    @property
    def line(self) -> str:
        """Return the problem and its number of occurrences in one line."""
        return f"{self.what}: {self.count:,} of {self.of:,} {self.unit}"


@dataclass(frozen=True)
class LengthShare:
    """Counts of pairs by which response is longer, in characters."""

    longer: int
    """Number of pairs whose chosen response is the longer one."""
    shorter: int
    """Number of pairs whose chosen response is the shorter one."""
    same: int
    """Number of pairs whose responses have the same length."""
    share: float | None
    """Share longer / (longer + shorter); None if no two lengths differ."""
    interval: tuple[float, float] | None
    """95% interval of the share by Wilson's method; None if there is no share."""

    @property
    def one_sided(self) -> bool:
        """Return whether length alone predicts the chosen response, beyond chance.

        It does if the interval excludes 1/2 and the share is at least 0.6 or at most 0.4.
        """
        if self.share is None or self.interval is None:
            return False
        low, high = self.interval
        return not low <= 0.5 <= high and max(self.share, 1 - self.share) >= LONGER_SHARE

    @property
    def line(self) -> str:
        """Return the share and its interval in one line."""
        if self.share is None or self.interval is None:
            return f"length: all {self.same:,} pairs have two responses of one length"
        low, high = self.interval
        words = (
            f"length: chosen is longer in {percent(self.share)} of the "
            f"{self.longer + self.shorter:,} pairs of different lengths (95% interval "
            f"{percent(low)} to {percent(high)})"
        )
        if not self.one_sided:
            return words
        side = "longer" if self.share > 0.5 else "shorter"
        right = percent(max(self.share, 1 - self.share))
        return f"{words}; taking the {side} response is right in {right}, whatever it says"


@dataclass(frozen=True, kw_only=True)
class Problems:
    """Problems of the training pairs, if given, and of the held-out pairs, counted together."""

    identical: Problem
    """Rows that the reader left out because their two responses are the same."""
    duplicates: Problem
    """Pairs with the same prompt, chosen and rejected response as an earlier pair."""
    contradictions: Problem
    """Pairs that repeat an earlier pair with chosen and rejected swapped."""
    one_for_many: Problem
    """Pairs whose chosen response is chosen for MANY_PROMPTS different prompts or more."""
    leaks: Problem | None
    """Held-out prompts that are also trained on; None without training pairs."""
    length: LengthShare
    """Counts of pairs by which response is longer."""

    @property
    def counted(self) -> tuple[Problem, ...]:
        """Return all problems that are counts; `length` is not one."""
        found = (self.identical, self.duplicates, self.contradictions, self.one_for_many)
        return found if self.leaks is None else (*found, self.leaks)


def find_problems(held_out: Rows[Preference], train: Rows[Preference] | None) -> Problems:
    """Find problems in all pairs; responses are compared without surrounding white space.

    held_out: pairs to evaluate on.
    train: pairs that the reward model was trained on; None if they are unknown.
    """
    sides = {"held-out": held_out} if train is None else {"training": train, "held-out": held_out}
    places = [
        (f"{side} row {number}", pair)
        for side, rows in sides.items()
        for number, pair in enumerate(rows.rows, start=1)
    ]
    first: dict[tuple[Messages, str, str], str] = {}
    duplicates, contradictions = list[str](), list[str]()
    answers: dict[str, list[tuple[str, Messages]]] = {}
    for place, pair in places:
        chosen, rejected = pair.chosen.strip(), pair.rejected.strip()
        answers.setdefault(chosen, []).append((place, pair.prompt))
        for found, key in (
            (duplicates, (pair.prompt, chosen, rejected)),
            (contradictions, (pair.prompt, rejected, chosen)),
        ):
            if key in first:
                found.append(f"{place} and {first[key]}: {prompt_text(pair.prompt)}")
        first.setdefault((pair.prompt, chosen, rejected), place)
    prompts = {text: len({prompt for _, prompt in given}) for text, given in answers.items()}
    many = sorted((x for x in prompts if prompts[x] >= MANY_PROMPTS), key=lambda x: -prompts[x])
    leaks = None
    if train is not None:
        trained_on = {pair.prompt for pair in train.rows}
        last = {pair.prompt: place for place, pair in reversed(places[len(train) :])}
        asked = dict.fromkeys(pair.prompt for pair in held_out.rows)
        leaked = [f"{last[p]}: {prompt_text(p)}" for p in asked if p in trained_on]
        leaks = Problem("held-out prompts that are trained on as well", len(leaked), len(asked),
                        "prompts", tuple(leaked[:EXAMPLES]))  # fmt: skip
    left_out = sum(rows.left_out[IDENTICAL] for rows in sides.values())
    read = len(places) + sum(rows.left_out.total() for rows in sides.values())
    pairs = len(places), "pairs"
    return Problems(
        identical=Problem("left out, its two responses being identical", left_out, read, "rows",
                          ()),
        duplicates=Problem("duplicates of an earlier pair", len(duplicates), *pairs,
                           tuple(duplicates[:EXAMPLES])),
        contradictions=Problem("contradictions of an earlier pair", len(contradictions), *pairs,
                               tuple(contradictions[:EXAMPLES])),
        one_for_many=Problem(
            f"response chosen for {MANY_PROMPTS} different prompts or more",
            sum(len(answers[text]) for text in many), *pairs,
            tuple(f"chosen for {prompts[text]} prompts, first in {answers[text][0][0]}: {text}"
                  for text in many[:EXAMPLES]),
        ),
        leaks=leaks,
        length=length_share(pair for _, pair in places),
    )  # fmt: skip


def length_share(pairs: Iterable[Preference]) -> LengthShare:
    """Return how often chosen is longer than rejected, with Wilson's interval.

    Source: Brown, Cai and DasGupta 2001, eq. 4, https://doi.org/10.1214/ss/1009213286
    """
    signs = Counter((len(p.chosen) > len(p.rejected)) - (len(p.chosen) < len(p.rejected))
                    for p in pairs)  # fmt: skip
    longer, shorter, same = signs[1], signs[-1], signs[0]
    if not longer + shorter:
        return LengthShare(longer, shorter, same, None, None)
    found = binomtest(longer, longer + shorter)
    low, high = found.proportion_ci(0.95, "wilson")
    return LengthShare(longer, shorter, same, found.statistic, (float(low), float(high)))
