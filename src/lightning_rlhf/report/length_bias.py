"""Length bias of a reward: whether its scores depend on the length of a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lightning_rlhf.report.estimates import (
    Correlation,
    Group,
    Interval,
    correlate,
    group_accuracy,
    interval95,
    resampled_means,
)
from lightning_rlhf.report.scored import Columns, ScoredSample

LONGER, SHORTER, SAME = "chosen longer", "chosen shorter", "same length"


@dataclass(frozen=True)
class LengthBias:
    """Relation of score and length, in tokens of the response."""

    groups: tuple[Group, ...]
    """Accuracy where chosen is longer, shorter, or as long as rejected; without empty groups."""
    gap: float | None
    """Accuracy where chosen is longer minus accuracy where it is shorter: 1 for a model that always
    takes the longer response, -1 for one that always takes the shorter; None if one group is
    empty."""
    gap_interval: Interval | None
    """95% interval of the gap; None if there is no gap, or if a group has a single prompt."""
    model_prefers_longer: float | None
    """Share of the pairs of different lengths in which the longer response scores higher; None
    without such pairs."""
    people_prefer_longer: float | None
    """Share of the pairs of different lengths in which the longer response was chosen; None without
    such pairs."""
    longer_is_right: float
    """Accuracy of always taking the longer response; two of equal length count one half."""
    responses: Correlation
    """Correlation of score and length over both responses of every pair."""
    pairs: Correlation
    """Correlation of the differences in score and in length, chosen minus rejected, over pairs. The
    mean differences, which reflect the labels' own preference for length, do not enter a
    correlation."""
    samples: Correlation
    """Correlation of score and length over SFT samples."""

    def group(self, label: str) -> Group | None:
        """Return the group with that label; None if it has no pairs."""
        return next((group for group in self.groups if group.label == label), None)


def measure_length_bias(pairs: Columns, samples: Sequence[ScoredSample], seed: int) -> LengthBias:
    """Return the accuracy by which response is longer, and the correlations of score and length.

    Source: Singhal et al. 2023, https://arxiv.org/abs/2310.03716
    """
    right, sign = pairs.right, np.sign(pairs.longer)
    index = np.select([sign > 0, sign < 0], [0, 1], 2)
    groups = group_accuracy(right, index, (LONGER, SHORTER, SAME), pairs.prompt, seed)
    gap, gap_interval = _gap(right, index, groups, pairs, seed)
    differ = sign != 0
    takes_longer = np.where(sign > 0, right, 1 - right)[differ]
    return LengthBias(
        groups=groups,
        gap=gap,
        gap_interval=gap_interval,
        model_prefers_longer=float(takes_longer.mean()) if differ.any() else None,
        people_prefer_longer=float((sign[differ] > 0).mean()) if differ.any() else None,
        longer_is_right=float(((sign + 1) / 2).mean()),
        responses=correlate(
            np.concatenate([pairs.chosen, pairs.rejected]),
            np.concatenate([pairs.chosen_tokens, pairs.rejected_tokens]),
        ),
        pairs=correlate(pairs.difference, pairs.longer),
        samples=correlate(
            np.array([s.score for s in samples], dtype=float),
            np.array([s.tokens for s in samples], dtype=float),
        ),
    )


def _gap(
    right: Float[ndarray, " N"],
    index: Int[ndarray, " N"],
    groups: Sequence[Group],
    pairs: Columns,
    seed: int,
) -> tuple[float | None, Interval | None]:
    """Return the gap, and its interval if both groups have one."""
    if [group.label for group in groups[:2]] != [LONGER, SHORTER]:
        return None, None
    longer, shorter = groups[:2]
    gap = longer.accuracy - shorter.accuracy
    if longer.interval is None or shorter.interval is None:
        return gap, None
    means = resampled_means(right, index, pairs.prompt, seed)
    return gap, interval95(means[:, 0] - means[:, 1])
