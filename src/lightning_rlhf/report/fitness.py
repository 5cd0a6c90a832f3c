"""Measurements of whether a reward is fit to be maximised, on held-out pairs and SFT samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lightning_rlhf.core.errors import DataError, RewardError
from lightning_rlhf.report.estimates import (
    Correlation,
    Distribution,
    Group,
    Interval,
    correlate,
    describe,
    equal_mass,
    group_accuracy,
    interval95,
    ranges,
    resampled_means,
    shared_edges,
)
from lightning_rlhf.rewards.format_check import PROBES, ProbeKind


@dataclass(frozen=True, kw_only=True)
class ScoredPair:
    """A held-out preference pair with its two scores."""

    prompt: str
    """Text of the prompt; the bootstrap draws all pairs of a prompt together."""
    chosen: str
    rejected: str
    chosen_score: float
    rejected_score: float
    chosen_tokens: int
    """Number of tokens of the chosen response, without the prompt."""
    rejected_tokens: int
    """Number of tokens of the rejected response, without the prompt."""
    margin: float | None = None
    """Strength of the preference for `chosen`; None if the data give none."""


@dataclass(frozen=True)
class ScoredSample:
    """A response sampled from the SFT model, from which PPO starts."""

    score: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class ScoredProbe:
    """A response that deserves less than `pair.chosen`, to the same prompt."""

    kind: ProbeKind
    response: str
    score: float
    pair: ScoredPair


@dataclass(frozen=True)
class Columns:
    """N pairs as arrays."""

    chosen: Float[ndarray, " N"]
    rejected: Float[ndarray, " N"]
    chosen_tokens: Float[ndarray, " N"]
    rejected_tokens: Float[ndarray, " N"]
    prompt: Int[ndarray, " N"]
    """Index of each pair's prompt; equal texts have equal indices."""

    @property
    def difference(self) -> Float[ndarray, " N"]:
        """Return the score of chosen minus the score of rejected."""
        return self.chosen - self.rejected

    @property
    def right(self) -> Float[ndarray, " N"]:
        """Return 1 where chosen scores higher, 0 where it scores lower, 1/2 at a tie."""
        return (np.sign(self.difference) + 1) / 2

    @property
    def longer(self) -> Float[ndarray, " N"]:
        """Return the tokens of chosen minus the tokens of rejected."""
        return self.chosen_tokens - self.rejected_tokens


def columns(pairs: Sequence[ScoredPair]) -> Columns:
    """Return the pairs as arrays.

    Raises:
        RewardError: a score is not a finite number; names the pair.
        DataError: a given margin is not a finite number; names the pair.
        ValueError: there is no pair.
    """
    if not pairs:
        raise ValueError("a fitness report needs at least one scored pair, found none")
    for number, pair in enumerate(pairs, start=1):
        for side, score in (("chosen", pair.chosen_score), ("rejected", pair.rejected_score)):
            what = f"pair {number}: the score of its {side} response"
            _check_finite(score, what, f". Its prompt: {pair.prompt[:80]!r}")
        if pair.margin is not None and not math.isfinite(pair.margin):
            raise DataError(f"pair {number}: its margin is {pair.margin}, not a finite number")
    number_of = {prompt: i for i, prompt in enumerate(dict.fromkeys(p.prompt for p in pairs))}
    return Columns(
        chosen=np.array([p.chosen_score for p in pairs], dtype=float),
        rejected=np.array([p.rejected_score for p in pairs], dtype=float),
        chosen_tokens=np.array([p.chosen_tokens for p in pairs], dtype=float),
        rejected_tokens=np.array([p.rejected_tokens for p in pairs], dtype=float),
        prompt=np.array([number_of[p.prompt] for p in pairs]),
    )


def _check_finite(score: float, what: str, where: str = "") -> None:
    if not math.isfinite(score):
        raise RewardError(f"{what} is {score}; a reward source has to give a finite number{where}")


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Result of one kind of probe; medians and means are over the prompts that were probed."""

    kind: ProbeKind
    prompts: int
    """Number of prompts that were probed."""
    mean: float
    median: float
    chosen_median: float
    """Median score of the good responses to the same prompts."""
    rejected_median: float
    """Median score of the rejected responses to the same prompts."""
    beats_chosen: float
    """Share of prompts in which the probe scores above the good response, a tie counting one
    half."""
    example: ScoredProbe
    """Probe whose score is nearest to the median; the first if there are several."""

    @property
    def wins(self) -> bool:
        """Return whether the median is above that of the good responses."""
        return self.median > self.chosen_median


def measure_probes(probes: Sequence[ScoredProbe]) -> tuple[ProbeResult, ...]:
    """Return the result of each kind that was scored, in the order of PROBES.

    Raises:
        RewardError: a score is not a finite number; names the probe.
    """
    for probe in probes:
        where = f". Its prompt: {probe.pair.prompt[:80]!r}"
        _check_finite(probe.score, f"probe {probe.kind!r}: its score", where)
    by_kind = {kind: [probe for probe in probes if probe.kind == kind] for kind in PROBES}
    return tuple(_result(kind, scored) for kind, scored in by_kind.items() if scored)


def _result(kind: ProbeKind, probes: Sequence[ScoredProbe]) -> ProbeResult:
    middle = float(median(probe.score for probe in probes))
    leads = [probe.score - probe.pair.chosen_score for probe in probes]
    return ProbeResult(
        kind=kind,
        prompts=len(probes),
        mean=fmean(probe.score for probe in probes),
        median=middle,
        chosen_median=float(median(probe.pair.chosen_score for probe in probes)),
        rejected_median=float(median(probe.pair.rejected_score for probe in probes)),
        beats_chosen=fmean(0.5 if lead == 0 else float(lead > 0) for lead in leads),
        example=min(probes, key=lambda probe: abs(probe.score - middle)),
    )


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
    over = None
    if pairs.prompt.max() > 0:
        one_group = np.zeros(count, dtype=int)
        over = resampled_means(confidence - right, one_group, pairs.prompt, seed)
    variance = np.where(logit == 0, 0.0, confidence * (1 - confidence))  # no variance at a tie
    by_chance = sum(math.sqrt(variance[rows].sum()) for rows in inside)
    return Calibration(
        log_loss=float(np.logaddexp(0.0, -logit).mean()),
        ece=sum(p.pairs / count * abs(p.confidence - p.accuracy) for p in points),
        ece_of_calibrated=math.sqrt(2 / math.pi) / count * by_chance,
        overconfidence=float((confidence - right).mean()),
        overconfidence_interval=None if over is None else interval95(over[:, 0]),
        points=points,
    )


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
    for number, sample in enumerate(samples, start=1):
        _check_finite(sample.score, f"SFT sample {number}: its score")
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
