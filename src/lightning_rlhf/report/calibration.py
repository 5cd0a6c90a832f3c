"""Calibration of a reward model: whether its confidence matches its accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lightning_rlhf.report.estimates import Interval, equal_mass, interval95, resampled_means
from lightning_rlhf.report.scored import Columns

BINS = 10
"""Maximum number of bins by confidence."""


@dataclass(frozen=True)
class ReliabilityPoint:
    """One bin of pairs with similar confidence."""

    pairs: int
    """Number of pairs in the bin."""
    confidence: float
    """Mean confidence of the pairs, 0.5 to 1."""
    accuracy: float
    """Share of the pairs ranked right, a tie counting one half."""


@dataclass(frozen=True)
class Calibration:
    """Agreement of a reward model's probabilities with the preferences."""

    log_loss: float
    """Mean over pairs of -log P(chosen), nats a pair; lower is better, guessing gives log 2."""
    ece: float
    """Expected calibration error, 0 to 1; lower is better."""
    ece_of_calibrated: float
    """Calibration error that a calibrated model would show by chance on as many pairs."""
    overconfidence: float
    """Mean confidence minus accuracy; above 0 the model is more confident than accurate."""
    overconfidence_interval: Interval | None
    """95% interval of the overconfidence; None if all pairs have the same prompt."""
    points: tuple[ReliabilityPoint, ...]
    """Bins from the least to the most confident pairs."""


def calibrate(pairs: Columns, logit_scale: float, seed: int) -> Calibration:
    """Return the calibration of P(chosen) = sigmoid(logit_scale * (chosen - rejected)).

    A pair lists its preferred response first, so that the outcome of "chosen" is always the same;
    calibration is therefore measured on the model's own choice:
        confidence = max(P, 1 - P) = sigmoid(logit_scale * |chosen - rejected|)
        right = 1 where the sign is right, 0 where it is wrong, 1/2 at a tie
        ECE = sum_b n_b / N * |mean confidence_b - mean right_b|, over 10 bins of equal mass
        ECE of a calibrated model = sqrt(2 / pi) / N * sum_b sqrt(sum_i confidence (1 - confidence))
    The last is the mean absolute value of a bin's error when the outcomes are drawn with the stated
    confidences, in the normal approximation.

    Source: Guo et al. 2017, eq. 3, https://arxiv.org/abs/1706.04599
    Departs: bins of equal mass, not of equal width, since most bins of equal width are empty.
    """
    logit = logit_scale * pairs.difference
    right = pairs.right
    confidence = 1 / (1 + np.exp(-np.abs(logit)))
    bins = equal_mass(confidence, BINS)
    inside = [bins == index for index in range(int(bins.max()) + 1)]
    points = tuple(
        ReliabilityPoint(int(rows.sum()), float(confidence[rows].mean()), float(right[rows].mean()))
        for rows in inside
    )
    count = len(right)
    variance = np.where(logit == 0, 0.0, confidence * (1 - confidence))  # no variance at a tie
    by_chance = sum(math.sqrt(variance[rows].sum()) for rows in inside)
    return Calibration(
        log_loss=float(np.logaddexp(0.0, -logit).mean()),
        ece=sum(p.pairs / count * abs(p.confidence - p.accuracy) for p in points),
        ece_of_calibrated=math.sqrt(2 / math.pi) / count * by_chance,
        overconfidence=float((confidence - right).mean()),
        overconfidence_interval=_interval(confidence - right, pairs, seed),
        points=points,
    )


def _interval(values: Float[ndarray, " N"], pairs: Columns, seed: int) -> Interval | None:
    if pairs.prompt.max() == 0:
        return None
    one_group = np.zeros(len(values), dtype=int)
    return interval95(resampled_means(values, one_group, pairs.prompt, seed)[:, 0])
