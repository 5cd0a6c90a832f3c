"""Problems of preference pairs that show without a model, found in time linear in their number."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from scipy.stats import binomtest

from lightning_rlhf.core.errors import percent
from lightning_rlhf.data.rows import IDENTICAL, Messages, Preference, Rows, prompt_text
from lightning_rlhf.io.console import print_line

EXAMPLES = 3
"""Maximum number of examples of each problem."""
MANY_PROMPTS = 5
"""Number of different prompts from which on a repeated chosen response is a problem, as it cannot
answer all of them."""
LONGER_SHARE = 0.6
"""Accuracy of always taking the longer response (or the shorter) from which on length alone
predicts the labels."""
PROBLEMS = {
    "identical": ("rows", "left out, its two responses being identical"),
    "duplicates": ("pairs", "duplicates of an earlier pair"),
    "contradictions": ("pairs", "contradictions of an earlier pair"),
    "one_for_many": ("pairs", f"response chosen for {MANY_PROMPTS} different prompts or more"),
    "leaks": ("prompts", "held-out prompts that are trained on as well"),
}
"""Unit and description of each kind of problem; a "contradiction" is an earlier pair swapped."""


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


@dataclass(frozen=True)
class Problems:
    """Problems of the training pairs, if given, and of the held-out pairs, counted together."""

    counted: Mapping[str, Problem]
    """Problem of each name in PROBLEMS; without training pairs there are no "leaks"."""
    length: LengthShare
    """Counts of pairs by which response is longer."""


def find_problems(held_out: Rows[Preference], train: Rows[Preference] | None) -> Problems:
    """Find problems in all pairs; responses are compared without surrounding white space.

    Args:
        held_out: pairs to evaluate on.
        train: pairs that the reward model was trained on; None if they are unknown.
    """
    sides = {"training": train.rows if train else (), "held-out": held_out.rows}
    first: dict[tuple[Messages, str, str], str] = {}
    found: dict[str, list[str]] = {name: [] for name in PROBLEMS}
    places: dict[str, dict[Messages, str]] = {side: {} for side in sides}
    answered: dict[str, list[tuple[str, Messages]]] = defaultdict(list)
    for side, pairs in sides.items():
        for number, pair in enumerate(pairs, start=1):
            place, prompt = f"{side} row {number}", pair.prompt
            chosen, rejected = pair.chosen.strip(), pair.rejected.strip()
            same, swapped = (prompt, chosen, rejected), (prompt, rejected, chosen)
            for name, key in (("duplicates", same), ("contradictions", swapped)):
                if earlier := first.get(key):
                    found[name].append(f"{place} and {earlier}: {prompt_text(prompt)}")
            first.setdefault(same, place)
            places[side].setdefault(prompt, place)
            answered[chosen].append((place, prompt))
    for prompt, place in places["held-out"].items():
        if prompt in places["training"]:
            found["leaks"].append(f"{place}: {prompt_text(prompt)}")
    prompts = {response: len({p for _, p in given}) for response, given in answered.items()}
    many = sorted((r for r in prompts if prompts[r] >= MANY_PROMPTS), key=lambda r: -prompts[r])
    for r in many:
        line = f"chosen for {prompts[r]} prompts, first in {answered[r][0][0]}: {r}"
        found["one_for_many"].append(line)
    left_out = sum((rows.left_out for rows in (train, held_out) if rows), Counter())
    counts = {name: len(lines) for name, lines in found.items()} | {
        "identical": left_out[IDENTICAL],
        "one_for_many": sum(len(answered[r]) for r in many),
    }
    all_pairs = [*chain.from_iterable(sides.values())]
    examined = {"pairs": len(all_pairs), "prompts": len(places["held-out"])}
    examined["rows"] = len(all_pairs) + left_out.total()
    counted = {
        name: Problem(what, counts[name], examined[unit], unit, tuple(found[name][:EXAMPLES]))
        for name, (unit, what) in PROBLEMS.items()
        if train or name != "leaks"
    }
    return Problems(counted, length_share(all_pairs))


def length_share(pairs: Iterable[Preference]) -> LengthShare:
    """Return how often chosen is longer than rejected, with Wilson's interval.

    Source: Brown, Cai and DasGupta 2001, eq. 4, https://doi.org/10.1214/ss/1009213286
    """
    lengths = [(len(pair.chosen), len(pair.rejected)) for pair in pairs]
    longer = sum(chosen > rejected for chosen, rejected in lengths)
    shorter = sum(chosen < rejected for chosen, rejected in lengths)
    n = longer + shorter
    if not n:
        return LengthShare(longer, shorter, len(lengths), None, None)
    low, high = binomtest(longer, n).proportion_ci(method="wilson")
    return LengthShare(longer, shorter, len(lengths) - n, longer / n, (float(low), float(high)))


def print_problems(problems: Problems) -> None:
    """Print the problems of the preference pairs in one line, or nothing if there are none."""
    found = [problem.line for problem in problems.counted.values() if problem.count]
    found += [problems.length.line] if problems.length.one_sided else []
    if found:
        print_line(f"preference pairs to look at: {'; '.join(found)}", "yellow")
