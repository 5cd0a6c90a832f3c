"""What is wrong with preference pairs before any model has read them; linear in their number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_rlhf.core.percent import percent
from lightning_rlhf.data.parsing import IDENTICAL
from lightning_rlhf.data.readers import Rows
from lightning_rlhf.data.rows import Messages, Preference, prompt_text

EXAMPLES = 3
"""Of each problem."""
MANY_PROMPTS = 5
"""Different prompts from which on one chosen response cannot speak of what was asked."""
LONGER_SHARE = 0.6
"""Share from which on length alone is a rule: taking the longer response is right so often."""


@dataclass(frozen=True)
class Problem:
    """One kind of problem."""

    what: str
    count: int
    of: int
    """Among how many."""
    unit: str
    examples: tuple[str, ...]
    """The first ones, by row; rows are counted among those that can be used, from 1."""

    @property
    def line(self) -> str:
        """In words."""
        return f"{self.what}: {self.count:,} of {self.of:,} {self.unit}"


@dataclass(frozen=True)
class LengthShare:
    """Which response is longer, in characters."""

    longer: int
    """Pairs in which chosen is."""
    shorter: int
    same: int
    share: float | None
    """longer / (longer + shorter); None where no two lengths differ."""
    interval: tuple[float, float] | None
    """95%, Wilson's."""

    @property
    def one_sided(self) -> bool:
        """Whether length alone tells the chosen response, beyond chance: the interval leaves 1/2
        out and the share is 0.6 or more, or 0.4 or less."""
        if self.share is None or self.interval is None:
            return False
        low, high = self.interval
        beyond_chance = not low <= 0.5 <= high
        return beyond_chance and max(self.share, 1 - self.share) >= LONGER_SHARE

    @property
    def line(self) -> str:
        """In words."""
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
    """Of the pairs to train on, if given, and of those held out, counted together."""

    identical: Problem
    """Rows that the reader left out, since their two responses are the same."""
    duplicates: Problem
    """The same prompt, chosen and rejected as in an earlier pair."""
    contradictions: Problem
    """The same as an earlier pair, with chosen and rejected the other way round."""
    one_for_many: Problem
    """Pairs whose chosen response is chosen for MANY_PROMPTS different prompts or more."""
    leaks: Problem | None
    """Held-out prompts that are trained on as well; None without pairs to train on."""
    length: LengthShare

    @property
    def counted(self) -> tuple[Problem, ...]:
        """All but length."""
        found = (self.identical, self.duplicates, self.contradictions, self.one_for_many)
        return found if self.leaks is None else (*found, self.leaks)

    @property
    def lines(self) -> tuple[str, ...]:
        """A line for each problem, found or not."""
        return (*(problem.line for problem in self.counted), self.length.line)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a pair stands."""

    side: str
    row: int
    pair: Preference

    def __str__(self) -> str:
        return f"{self.side} row {self.row}"


def find_problems(held_out: Rows[Preference], train: Rows[Preference] | None) -> Problems:
    """Look through all pairs. Texts are the same where they are so without outer white space.

    Args:
        held_out: pairs to measure on.
        train: pairs that the reward model was trained on, where they are known.
    """
    sides = {"held-out": held_out} if train is None else {"training": train, "held-out": held_out}
    places = [
        _Place(side, row, pair)
        for side, rows in sides.items()
        for row, pair in enumerate(rows.rows, start=1)
    ]
    left_out = sum(rows.left_out[IDENTICAL] for rows in sides.values())
    read = len(places) + sum(rows.left_out.total() for rows in sides.values())
    return Problems(
        identical=Problem(
            "left out, its two responses being identical", left_out, read, "rows", ()
        ),
        duplicates=_repeats("duplicates of an earlier pair", places, _same),
        contradictions=_repeats("contradictions of an earlier pair", places, _swapped),
        one_for_many=_one_for_many(places),
        leaks=None if train is None else _leaks(held_out.rows, train.rows),
        length=length_share([place.pair for place in places]),
    )


def length_share(pairs: Iterable[Preference]) -> LengthShare:
    """How often chosen is longer than rejected, with Wilson's interval.

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


_Key = tuple[Messages, str, str]


def _same(pair: Preference) -> _Key:
    return pair.prompt, pair.chosen.strip(), pair.rejected.strip()


def _swapped(pair: Preference) -> _Key:
    return pair.prompt, pair.rejected.strip(), pair.chosen.strip()


def _repeats(what: str, places: Sequence[_Place], key: Callable[[Preference], _Key]) -> Problem:
    """Pairs whose `key` is that of an earlier pair as it stands."""
    first: dict[_Key, _Place] = {}
    found: list[tuple[_Place, _Place]] = []
    for place in places:
        if key(place.pair) in first:
            found.append((place, first[key(place.pair)]))
        first.setdefault(_same(place.pair), place)
    examples = (
        f"{later} and {earlier}: {prompt_text(later.pair.prompt)}"
        for later, earlier in found[:EXAMPLES]
    )
    return Problem(what, len(found), len(places), "pairs", tuple(examples))


def _one_for_many(places: Sequence[_Place]) -> Problem:
    by_response: dict[str, list[_Place]] = {}
    for place in places:
        by_response.setdefault(place.pair.chosen.strip(), []).append(place)
    many = {
        response: (len(chosen_at), prompts)
        for response, chosen_at in by_response.items()
        if (prompts := len({place.pair.prompt for place in chosen_at})) >= MANY_PROMPTS
    }
    most = sorted(many, key=lambda response: -many[response][1])[:EXAMPLES]
    what = f"response chosen for {MANY_PROMPTS} different prompts or more"
    examples = (
        f"chosen for {many[response][1]} prompts, first in {by_response[response][0]}: {response}"
        for response in most
    )
    return Problem(
        what, sum(count for count, _ in many.values()), len(places), "pairs", tuple(examples)
    )


def _leaks(held_out: Sequence[Preference], train: Sequence[Preference]) -> Problem:
    trained_on = {pair.prompt for pair in train}
    first: dict[Messages, int] = {}
    for row, pair in enumerate(held_out, start=1):
        first.setdefault(pair.prompt, row)
    leaked = [prompt for prompt in first if prompt in trained_on]
    examples = (f"held-out row {first[p]}: {prompt_text(p)}" for p in leaked[:EXAMPLES])
    what = "held-out prompts that are trained on as well"
    return Problem(what, len(leaked), len(first), "prompts", tuple(examples))
