"""Is a reward fit to be maximised? What held-out pairs and samples of the SFT model say."""

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


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """A reward source on held-out pairs. Accuracy is the share of pairs in which chosen scores
    higher, a tie counting one half; intervals are 95%, by a bootstrap over prompts."""

    pairs: tuple[ScoredPair, ...]
    """What was measured."""
    samples: tuple[ScoredSample, ...]
    """Of the SFT model."""
    prompts: int
    """Different prompts among the pairs."""
    ties: int
    """Pairs whose two responses score the same."""
    accuracy: Group
    by_difference: tuple[Group, ...]
    """By quarter of |chosen - rejected|, the smallest first: a model that knows what it does not
    know is least accurate there."""
    by_margin: tuple[Group, ...]
    """By quarter of the strength of preference that the data give, over the pairs that have one;
    empty where none has."""
    length: LengthBias
    calibration: Calibration | None
    """None where the source's scores are no log-odds."""
    edges: tuple[float, ...]
    """Of the histograms, which leave out what lies far outside."""
    chosen: Distribution
    rejected: Distribution
    sampled: Distribution | None
    """SFT samples; None where there are none."""
    outside: float | None
    """Share of SFT samples whose score is above or below that of every response of the pairs."""


def measure_fitness(
    pairs: Sequence[ScoredPair],
    samples: Sequence[ScoredSample],
    *,
    logit_scale: float | None,
    seed: int,
) -> Fitness:
    """Measure a reward source. The same input and seed give the same numbers.

    Args:
        pairs: at least one.
        samples: any number.
        logit_scale: P(chosen) = sigmoid(logit_scale * (chosen - rejected)): 1 for the raw reward
            of a Bradley-Terry model, its standard deviation where it was divided by that; None
            for a source that promises no probabilities, whose calibration is then not asked.
        seed: of the bootstrap.

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
