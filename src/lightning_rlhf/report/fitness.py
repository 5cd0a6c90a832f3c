"""Measurements of whether a reward is fit to be maximised, on held-out pairs and SFT samples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from lightning_rlhf.report import estimates
from lightning_rlhf.report.estimates import Places, Values
from lightning_rlhf.rewards.format_check import PROBES, ProbeKind

LONGER, SHORTER, SAME = "chosen longer", "chosen shorter", "same length"
BINS, QUARTERS = 10, 4
"""Maximum number of bins by confidence, and of groups by size of a difference or margin."""
Numbers = Mapping[str, Any]
"""Name -> number, text or interval, as the function that measures them says."""
ScoredSample = tuple[float, int]
"""Score and number of tokens of a response of the SFT model, from which PPO starts."""


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


@dataclass(frozen=True, kw_only=True)
class ScoredProbe:
    """A response that deserves less than `pair.chosen`, to the same prompt."""

    kind: ProbeKind
    response: str
    score: float
    pair: ScoredPair


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """Measurements of a reward source on held-out pairs.

    Accuracy is the share of pairs in which chosen scores higher, a tie counting one half; intervals
    are 95%, by a bootstrap over prompts.
    """

    pairs: tuple[ScoredPair, ...]
    samples: tuple[ScoredSample, ...]
    prompts: int
    """Number of different prompts among the pairs."""
    ties: int
    """Number of pairs whose two responses score the same."""
    accuracy: estimates.Group
    by_difference: tuple[estimates.Group, ...]
    """Accuracy by quarter of |chosen - rejected|, the smallest first."""
    by_margin: tuple[estimates.Group, ...]
    """Accuracy by quarter of the margin given in the data, over the pairs that have one."""
    length: Numbers
    """Relation of score and length, of `length_bias`."""
    calibration: Numbers | None
    """Numbers of `calibrate`; None if the source's scores are not log-odds."""
    edges: tuple[float, ...]
    """Edges of the histograms' bins, which leave out values far outside."""
    chosen: Numbers
    """Distribution of the scores, of `describe`."""
    rejected: Numbers
    sampled: Numbers | None
    """Distribution of the scores of SFT samples; None without samples."""
    outside: float | None
    """Share of SFT samples that score above or below every response of the pairs."""

    @property
    def kinds(self) -> dict[str, Numbers]:
        """Return the distribution of the scores of each kind of response that was scored."""
        found = {"chosen": self.chosen, "rejected": self.rejected}
        return found if self.sampled is None else {**found, "SFT samples": self.sampled}

    @property
    def metrics(self) -> dict[str, float]:
        """Return the scalar measurements that are defined by the names they are logged under."""
        length, (low, high) = self.length, self.accuracy.interval or (None, None)
        found = {"accuracy": self.accuracy.accuracy, "accuracy_low": low, "accuracy_high": high}
        for group in length["groups"]:
            if group.label != SAME:
                found[f"accuracy_{group.label.replace(' ', '_')}"] = group.accuracy
        found["length_gap"] = length["gap"]
        for name, of in (("", "responses"), ("_within_pairs", "pairs"), ("_sft", "samples")):
            found[f"length_pearson{name}"] = length[of]["pearson"]
        found |= {"sft_outside": self.outside, "pairs": float(len(self.pairs))}
        for name in ("log_loss", "ece", "overconfidence"):
            found[name] = None if self.calibration is None else self.calibration[name]
        return {f"fitness/{name}": value for name, value in found.items() if value is not None}


def measure_fitness(
    pairs: Sequence[ScoredPair],
    samples: Sequence[ScoredSample],
    *,
    logit_scale: float | None,
    seed: int,
) -> Fitness:
    """Measure a reward source by finite scores. The same input and seed give the same numbers.

    Args:
        pairs: scored held-out pairs, at least one.
        samples: scored samples of the SFT model, any number.
        logit_scale: factor in P(chosen) = sigmoid(logit_scale * (chosen - rejected)): 1 for the raw
            reward of a Bradley-Terry model, its standard deviation if the reward was divided by
            that; None for a source that gives no probabilities, whose calibration is not measured.
        seed: seed of the bootstrap.
    """
    scores = np.array([(p.chosen_score, p.rejected_score) for p in pairs], dtype=float).T
    tokens = np.array([(p.chosen_tokens, p.rejected_tokens) for p in pairs], dtype=float).T
    sampled, sampled_tokens = np.array(samples, dtype=float).reshape(-1, 2).T
    number = {text: i for i, text in enumerate(sorted({pair.prompt for pair in pairs}))}
    prompt = np.array([number[pair.prompt] for pair in pairs])
    difference, longer = scores[0] - scores[1], tokens[0] - tokens[1]
    right, one_group = (np.sign(difference) + 1) / 2, np.zeros(len(pairs), dtype=int)

    def by_quarter(size: Values) -> tuple[estimates.Group, ...]:
        """Return the accuracy by quarter of a size, over the pairs that have one."""
        rows = ~np.isnan(size)
        if not rows.any():
            return ()
        quarter = estimates.equal_mass(size[rows], QUARTERS)
        _, prompts = np.unique(prompt[rows], return_inverse=True)
        inside = (size[rows][quarter == index] for index in range(int(quarter.max()) + 1))
        ends = ((f"{group.min():.3g}", f"{group.max():.3g}") for group in inside)
        labels = [low if low == high else f"{low} to {high}" for low, high in ends]
        return estimates.group_accuracy(right[rows], quarter, labels, prompts, seed)

    every = np.concatenate([scores.ravel(), sampled])
    bins = int(np.clip(np.sqrt(len(every)), 10, 40))
    edges = np.histogram_bin_edges(every, bins, range=estimates.inner_range(every))
    outside = (sampled < scores.min()) | (sampled > scores.max())
    odds = None if logit_scale is None else logit_scale * difference
    return Fitness(
        pairs=tuple(pairs),
        samples=tuple(samples),
        prompts=int(prompt.max()) + 1,
        ties=int((difference == 0).sum()),
        accuracy=estimates.group_accuracy(right, one_group, ["all"], prompt, seed)[0],
        by_difference=by_quarter(np.abs(difference)),
        by_margin=by_quarter(np.array([pair.margin for pair in pairs], dtype=float)),
        length={
            **length_bias(right, np.sign(longer), prompt, seed),
            "responses": estimates.correlate(scores.ravel(), tokens.ravel()),
            "pairs": estimates.correlate(difference, longer),
            "samples": estimates.correlate(sampled, sampled_tokens),
        },
        calibration=None if odds is None else calibrate(odds, right, prompt, seed),
        edges=tuple(edges.tolist()),
        chosen=estimates.describe(scores[0], edges),
        rejected=estimates.describe(scores[1], edges),
        sampled=estimates.describe(sampled, edges) if samples else None,
        outside=float(outside.mean()) if samples else None,
    )


def length_bias(right: Values, sign: Values, prompt: Places, seed: int) -> Numbers:
    """Return the accuracy by which response is longer.

    right: 1 where chosen scores higher, 1/2 at a tie; sign: 1 where chosen is longer, -1 where it
        is shorter.
    Returns:
        groups: accuracy where chosen is longer, shorter, or as long as rejected; no empty group.
        gap: accuracy where chosen is longer minus accuracy where it is shorter: 1 for a model that
            always takes the longer response, -1 for the shorter; None if one group is empty.
        gap_interval: 95% interval of the gap; None without one, or if a group has a single prompt.
        model_prefers_longer, people_prefer_longer: share of the pairs of different lengths in which
            the longer response scores higher, and was chosen; None without such pairs.
        longer_is_right: accuracy of always taking the longer response; two of equal length count
            one half.
    Source: Singhal et al. 2023, https://arxiv.org/abs/2310.03716
    """
    index = np.select([sign > 0, sign < 0], [0, 1], 2)
    groups = estimates.group_accuracy(right, index, (LONGER, SHORTER, SAME), prompt, seed)
    sides, gap, gap_interval = [g for g in groups if g.label != SAME], None, None
    if len(sides) == 2:
        gap = sides[0].accuracy - sides[1].accuracy
        if all(side.interval is not None for side in sides):
            means = estimates.resampled_means(right, index, prompt, seed)
            gap_interval = estimates.interval95(means[:, 0] - means[:, 1])
    differ = sign != 0
    takes_longer = np.where(sign > 0, right, 1 - right)[differ]
    return {
        "groups": groups,
        "gap": gap,
        "gap_interval": gap_interval,
        "model_prefers_longer": float(takes_longer.mean()) if differ.any() else None,
        "people_prefer_longer": float((sign[differ] > 0).mean()) if differ.any() else None,
        "longer_is_right": float(((sign + 1) / 2).mean()),
    }


def calibrate(logit: Values, right: Values, prompt: Places, seed: int) -> Numbers:
    """Return the calibration of P(chosen) = sigmoid(logit).

    A pair lists its preferred response first, so that the outcome of "chosen" is always the same;
    calibration is therefore measured on the model's own choice:
        confidence = max(P, 1 - P) = sigmoid(|logit|)
        right = 1 where the sign is right, 0 where it is wrong, 1/2 at a tie
        ECE = sum_b n_b / N * |mean confidence_b - mean right_b|, over 10 bins of equal mass
        ECE of a calibrated model = sqrt(2 / pi) / N * sum_b sqrt(sum_i confidence (1 - confidence))
    The last is the mean absolute value of a bin's error when the outcomes are drawn with the stated
    confidences, in the normal approximation.

    Returns:
        log_loss: mean over pairs of -log P(chosen), nats a pair; guessing gives log 2.
        ece, ece_of_calibrated: as above, 0 to 1; lower is better.
        overconfidence: mean confidence minus accuracy; above 0 it is more confident than accurate.
        overconfidence_interval: its 95% interval; None if all pairs have the same prompt.
        points: number of `pairs`, mean `confidence` and `accuracy` of each bin, the least confident
            first.
    Source: Guo et al. 2017, eq. 3, https://arxiv.org/abs/1706.04599
    Departs: bins of equal mass, not of equal width, since most bins of equal width are empty.
    """
    confidence = 1 / (1 + np.exp(-np.abs(logit)))
    bins, count = estimates.equal_mass(confidence, BINS), len(right)
    inside = [bins == index for index in range(int(bins.max()) + 1)]
    points = [
        {
            "pairs": int(rows.sum()),
            "confidence": float(confidence[rows].mean()),
            "accuracy": float(right[rows].mean()),
        }
        for rows in inside
    ]
    variance = np.where(logit == 0, 0.0, confidence * (1 - confidence))  # no variance at a tie
    by_chance = sum(math.sqrt(variance[rows].sum()) for rows in inside)
    excess = confidence - right
    means = estimates.resampled_means(excess, np.zeros(count, dtype=int), prompt, seed)
    return {
        "log_loss": float(np.logaddexp(0.0, -logit).mean()),
        "ece": sum(p["pairs"] / count * abs(p["confidence"] - p["accuracy"]) for p in points),
        "ece_of_calibrated": math.sqrt(2 / math.pi) / count * by_chance,
        "overconfidence": float(excess.mean()),
        "overconfidence_interval": estimates.interval95(means[:, 0]) if prompt.max() > 0 else None,
        "points": points,
    }


def measure_probes(probes: Sequence[ScoredProbe]) -> list[Numbers]:
    """Return the result of each kind that was scored, in the order of PROBES.

    Returns: with medians and means over the prompts that were probed,
        kind, prompts: kind of the probes, and number of their prompts.
        mean, median, chosen_median, rejected_median: of the scores of the probes, of the good and
            of the rejected responses to the same prompts.
        lead: median less that of the good responses; above 0 the probe wins.
        beats_chosen: share of prompts in which the probe scores above the good response, a tie
            counting one half.
        example: probe whose score is nearest to the median; the first if there are several.
    """
    results: list[Numbers] = []
    for kind in PROBES:
        scored = [probe for probe in probes if probe.kind == kind]
        if not scored:
            continue
        scores = [probe.score for probe in scored]
        good = [probe.pair.chosen_score for probe in scored]
        middle, chosen_middle = float(median(scores)), float(median(good))
        result: Numbers = {
            "kind": kind,
            "prompts": len(scored),
            "mean": fmean(scores),
            "median": middle,
            "chosen_median": chosen_middle,
            "rejected_median": float(median(probe.pair.rejected_score for probe in scored)),
            "lead": middle - chosen_middle,
            "beats_chosen": fmean((np.sign(np.subtract(scores, good)) + 1) / 2),
            "example": min(scored, key=lambda probe: abs(probe.score - middle)),
        }
        results.append(result)
    return results
