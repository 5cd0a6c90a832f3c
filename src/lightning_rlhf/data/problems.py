"""Problems of preference pairs that show without a model, found in time linear in their number."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from scipy.stats import binomtest

from lightning_rlhf.core.errors import percent
from lightning_rlhf.data.rows import IDENTICAL, Messages, Preference, Rows, prompt_text

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
        low, high = map(percent, self.interval)
        right, side = max((self.share, "longer"), (1 - self.share, "shorter"))
        rule = f"; taking the {side} response is right in {percent(right)}, whatever it says"
        return (
            f"length: chosen is longer in {percent(self.share)} of the "
            f"{self.longer + self.shorter:,} pairs of different lengths (95% interval {low} to "
            f"{high}){rule * self.one_sided}"
        )


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
        return tuple(found for found in vars(self).values() if isinstance(found, Problem))


def find_problems(held_out: Rows[Preference], train: Rows[Preference] | None) -> Problems:
    """Find problems in all pairs; responses are compared without surrounding white space.

    Args:
        held_out: pairs to evaluate on.
        train: pairs that the reward model was trained on; None if they are unknown.
    """
    sides = {"training": train.rows if train else (), "held-out": held_out.rows}
    first: dict[tuple[Messages, str, str], str] = {}
    duplicates: list[str] = []
    contradictions: list[str] = []
    asked: dict[str, dict[Messages, str]] = {side: {} for side in sides}
    answered: dict[str, list[tuple[str, Messages]]] = {}
    for side, pairs in sides.items():
        for number, pair in enumerate(pairs, start=1):
            place, prompt = f"{side} row {number}", pair.prompt
            chosen, rejected = pair.chosen.strip(), pair.rejected.strip()
            for found, key in ((duplicates, (prompt, chosen, rejected)),
                               (contradictions, (prompt, rejected, chosen))):  # fmt: skip
                if earlier := first.get(key):
                    found.append(f"{place} and {earlier}: {prompt_text(prompt)}")
            first.setdefault((prompt, chosen, rejected), place)
            asked[side].setdefault(prompt, place)
            answered.setdefault(chosen, []).append((place, prompt))
    prompts = {response: len({p for _, p in given}) for response, given in answered.items()}
    many = sorted((r for r in prompts if prompts[r] >= MANY_PROMPTS), key=lambda r: -prompts[r])
    for_many = [f"chosen for {prompts[r]} prompts, first in {answered[r][0][0]}: {r}" for r in many]
    leaked = [f"{place}: {prompt_text(prompt)}" for prompt, place in asked["held-out"].items()
              if prompt in asked["training"]]  # fmt: skip
    left_out = sum((rows.left_out for rows in (train, held_out) if rows), Counter())
    all_pairs = [*chain.from_iterable(sides.values())]

    def problem(
        what: str, of: int, unit: str, found: list[str], count: int | None = None
    ) -> Problem:
        number = len(found) if count is None else count
        return Problem(what, number, of, unit, tuple(found[:EXAMPLES]))

    count = len(all_pairs)
    return Problems(
        identical=problem("left out, its two responses being identical",
                          count + left_out.total(), "rows", [], left_out[IDENTICAL]),
        duplicates=problem("duplicates of an earlier pair", count, "pairs", duplicates),
        contradictions=problem("contradictions of an earlier pair", count, "pairs", contradictions),
        one_for_many=problem(f"response chosen for {MANY_PROMPTS} different prompts or more", count,
                             "pairs", for_many, sum(len(answered[r]) for r in many)),
        leaks=problem("held-out prompts that are trained on as well", len(asked["held-out"]),
                      "prompts", leaked) if train else None,
        length=length_share(all_pairs),
    )  # fmt: skip


def length_share(pairs: Iterable[Preference]) -> LengthShare:
    """Return how often chosen is longer than rejected, with Wilson's interval.

    Source: Brown, Cai and DasGupta 2001, eq. 4, https://doi.org/10.1214/ss/1009213286
    """
    signs = Counter((len(p.chosen) > len(p.rejected)) - (len(p.chosen) < len(p.rejected))
                    for p in pairs)  # fmt: skip
    longer, shorter, same = signs[1], signs[-1], signs[0]
    if not (n := longer + shorter):
        return LengthShare(longer, shorter, same, None, None)
    low, high = binomtest(longer, n).proportion_ci(method="wilson")
    return LengthShare(longer, shorter, same, longer / n, (float(low), float(high)))
