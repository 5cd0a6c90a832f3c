"""Measurements of whether a reward is fit to be maximised, on held-out pairs and SFT samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlhf.report.calibration import Calibration, calibrate
from lightning_rlhf.report.estimates import (
    Distribution,
    Group,
    describe,
    equal_mass,
    group_accuracy,
    ranges,
    shared_edges,
)
from lightning_rlhf.report.length_bias import LengthBias, measure_length_bias
from lightning_rlhf.report.scored import ScoredPair, ScoredSample, check_samples, columns

QUARTERS = 4
"""Maximum number of groups by size of a difference or margin."""


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """Measurements of a reward source on held-out pairs.

    Accuracy is the share of pairs in which chosen scores higher, a tie counting one half; intervals
    are 95%, by a bootstrap over prompts.
    """

    pairs: tuple[ScoredPair, ...]
    """Pairs that were measured."""
    samples: tuple[ScoredSample, ...]
    """Samples of the SFT model that were measured."""
    prompts: int
    """Number of different prompts among the pairs."""
    ties: int
    """Number of pairs whose two responses score the same."""
    accuracy: Group
    """Accuracy over all pairs."""
    by_difference: tuple[Group, ...]
    """Accuracy by quarter of |chosen - rejected|, the smallest first; a well calibrated model is
    least accurate in the first quarter."""
    by_margin: tuple[Group, ...]
    """Accuracy by quarter of the margin given in the data, over the pairs that have one; empty if
    none has."""
    length: LengthBias
    calibration: Calibration | None
    """Calibration of the source; None if its scores are not log-odds."""
    edges: tuple[float, ...]
    """Edges of the histograms' bins, which leave out values far outside."""
    chosen: Distribution
    """Distribution of the scores of chosen responses."""
    rejected: Distribution
    """Distribution of the scores of rejected responses."""
    sampled: Distribution | None
    """Distribution of the scores of SFT samples; None without samples."""
    outside: float | None
    """Share of SFT samples that score above or below every response of the pairs; None without
    samples."""


def measure_fitness(
    pairs: Sequence[ScoredPair],
    samples: Sequence[ScoredSample],
    *,
    logit_scale: float | None,
    seed: int,
) -> Fitness:
    """Measure a reward source. The same input and seed give the same numbers.

    Args:
        pairs: scored held-out pairs, at least one.
        samples: scored samples of the SFT model, any number.
        logit_scale: factor in P(chosen) = sigmoid(logit_scale * (chosen - rejected)): 1 for the raw
            reward of a Bradley-Terry model, its standard deviation if the reward was divided by
            that; None for a source that gives no probabilities, whose calibration is not measured.
        seed: seed of the bootstrap.

    Raises:
        RewardError: a score is not a finite number; names the pair or sample.
        DataError: a margin is not a finite number; names the pair.
        ValueError: there is no pair.
    """
    table = columns(pairs)
    check_samples(samples)
    right = table.right
    all_pairs = group_accuracy(right, np.zeros(len(pairs), int), ["all"], table.prompt, seed)
    size = np.abs(table.difference)
    quarter = equal_mass(size, QUARTERS)
    sampled = np.array([sample.score for sample in samples], dtype=float)
    both = np.concatenate([table.chosen, table.rejected])
    edges = shared_edges(np.concatenate([both, sampled]))
    outside = (sampled < both.min()) | (sampled > both.max())
    return Fitness(
        pairs=tuple(pairs),
        samples=tuple(samples),
        prompts=int(table.prompt.max()) + 1,
        ties=int((table.difference == 0).sum()),
        accuracy=all_pairs[0],
        by_difference=group_accuracy(right, quarter, ranges(size, quarter), table.prompt, seed),
        by_margin=_by_margin(pairs, seed),
        length=measure_length_bias(table, samples, seed),
        calibration=None if logit_scale is None else calibrate(table, logit_scale, seed),
        edges=tuple(edges.tolist()),
        chosen=describe(table.chosen, edges),
        rejected=describe(table.rejected, edges),
        sampled=describe(sampled, edges) if samples else None,
        outside=float(outside.mean()) if samples else None,
    )


def _by_margin(pairs: Sequence[ScoredPair], seed: int) -> tuple[Group, ...]:
    given = [pair for pair in pairs if pair.margin is not None]
    if not given:
        return ()
    table = columns(given)
    margin = np.array([pair.margin for pair in given], dtype=float)
    quarter = equal_mass(margin, QUARTERS)
    return group_accuracy(table.right, quarter, ranges(margin, quarter), table.prompt, seed)
