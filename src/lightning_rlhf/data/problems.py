"""Problems of preference pairs that show without a model, found in time linear in their number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
        beyond_chance = not low <= 0.5 <= high
        return beyond_chance and max(self.share, 1 - self.share) >= LONGER_SHARE

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


_Place = tuple[str, Preference]
"""A pair, and where in the data it stands: "held-out row 3"."""


def find_problems(held_out: Rows[Preference], train: Rows[Preference] | None) -> Problems:
    """Find problems in all pairs; responses are compared without surrounding white space.

    Args:
        held_out: pairs to evaluate on.
        train: pairs that the reward model was trained on; None if they are unknown.
    """
    sides = {"held-out": held_out} if train is None else {"training": train, "held-out": held_out}
    places = [
        (f"{side} row {number}", pair)
        for side, rows in sides.items()
        for number, pair in enumerate(rows.rows, start=1)
    ]
    left_out = sum(rows.left_out[IDENTICAL] for rows in sides.values())
    read = len(places) + sum(rows.left_out.total() for rows in sides.values())
    leaks = None
    if train is not None:
        first: dict[Messages, str] = {}
        for place, pair in places[len(train) :]:
            first.setdefault(pair.prompt, place)
        trained_on = {pair.prompt for pair in train.rows}
        leaked = [f"{first[p]}: {prompt_text(p)}" for p in first if p in trained_on]
        what = "held-out prompts that are trained on as well"
        leaks = Problem(what, len(leaked), len(first), "prompts", tuple(leaked[:EXAMPLES]))
    what = "left out, its two responses being identical"
    return Problems(
        identical=Problem(what, left_out, read, "rows", ()),
        duplicates=_repeats("duplicates", places, swapped=False),
        contradictions=_repeats("contradictions", places, swapped=True),
        one_for_many=_one_for_many(places),
        leaks=leaks,
        length=length_share([pair for _, pair in places]),
    )


def length_share(pairs: Iterable[Preference]) -> LengthShare:
    """Return how often chosen is longer than rejected, with Wilson's interval.

    With p = k / n and z = 1.96:
        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Source: Brown, Cai and DasGupta 2001, eq. 4, https://doi.org/10.1214/ss/1009213286
    """
    signs = Counter((len(p.chosen) > len(p.rejected)) - (len(p.chosen) < len(p.rejected))
                    for p in pairs)  # fmt: skip
    longer, shorter, same = signs[1], signs[-1], signs[0]
    n, z = longer + shorter, 1.96
    if not n:
        return LengthShare(longer, shorter, same, None, None)
    share = longer / n
    middle = share + z**2 / (2 * n)
    reach = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = ((middle + side * reach) / (1 + z**2 / n) for side in (-1, 1))
    return LengthShare(longer, shorter, same, share, (low, high))


def _repeats(what: str, places: Sequence[_Place], *, swapped: bool) -> Problem:
    """Return the pairs that repeat an earlier pair, or with its responses swapped."""
    first: dict[tuple[Messages, str, str], str] = {}
    found: list[str] = []
    for place, pair in places:
        sides = pair.chosen.strip(), pair.rejected.strip()
        key = (pair.prompt, *(sides[::-1] if swapped else sides))
        if key in first:
            found.append(f"{place} and {first[key]}: {prompt_text(pair.prompt)}")
        first.setdefault((pair.prompt, *sides), place)
    examples = tuple(found[:EXAMPLES])
    return Problem(f"{what} of an earlier pair", len(found), len(places), "pairs", examples)


def _one_for_many(places: Sequence[_Place]) -> Problem:
    by_response: dict[str, list[_Place]] = {}
    for place in places:
        by_response.setdefault(place[1].chosen.strip(), []).append(place)
    prompts = {r: len({pair.prompt for _, pair in found}) for r, found in by_response.items()}
    many = sorted((r for r in prompts if prompts[r] >= MANY_PROMPTS), key=lambda r: -prompts[r])
    examples = (
        f"chosen for {prompts[r]} prompts, first in {by_response[r][0][0]}: {r}"
        for r in many[:EXAMPLES]
    )
    what = f"response chosen for {MANY_PROMPTS} different prompts or more"
    count = sum(len(by_response[r]) for r in many)
    return Problem(what, count, len(places), "pairs", tuple(examples))
