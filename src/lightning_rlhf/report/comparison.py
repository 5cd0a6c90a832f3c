"""Policies compared on the same prompts: paired differences, win rates and pass@k."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lightning_rlhf.core.kl import best_of_kl
from lightning_rlhf.core.metrics import PASS
from lightning_rlhf.report.estimates import Interval, mean_interval, rate_interval, single

Sample = Mapping[str, Any]
Decoding = Literal["sampled", "greedy"]
DECODINGS: tuple[Decoding, ...] = ("sampled", "greedy")
REWARD = "reward"
"""Name of the score of the whole reward."""
UNSCORED: Mapping[Decoding, Sequence[str]] = {"sampled": ("kl", "tokens"), "greedy": ("tokens",)}
"""Keys of a sample that are compared and have no better or worse; the log-ratio of a greedy
response is no estimate of the KL."""


@dataclass(frozen=True, kw_only=True)
class PolicySamples:
    """Responses of one policy to the prompts, in the prompts' order."""

    name: str
    samples: Mapping[Decoding, Sequence[Sample]]
    """Samples of each decoding, the same number for every prompt, one prompt after the other."""
    perplexity: float | None
    """Perplexity of the held-out demonstrations; None where the data have none."""
    best_of: int | None = None
    """Number of responses of which each sample is the best; None for a policy's own samples."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One number of a policy less that of another one, on the same prompts."""

    policy: str
    other: str
    decoding: Decoding
    number: str
    """Name of the number: "reward", a component, a part of the judge's verdict, "kl", "tokens"."""
    prompts: int
    """Number of prompts for which both policies have the number."""
    difference: float
    """Mean over prompts of the difference of the policies' means over responses."""
    interval: Interval | None
    """95% interval of the difference, by bootstrap over prompts; None for one prompt."""
    win_rate: float | None
    """Mean over prompts of the share of paired responses of `policy` that score higher, a tie
    counting one half; None for a number that is no score."""
    win_interval: Interval | None
    """95% interval of the win rate; None for one prompt, or without a win rate."""
    ties: float | None
    """Mean over prompts of the share of ties; None without a win rate."""


def compare_all(
    policies: Sequence[PolicySamples], prompts: int, seed: int
) -> tuple[Comparison, ...]:
    """Return the comparisons of each policy with the first, then of the others with each other.

    prompts: number of prompts; seed: of the resamples.
    """
    first, *others = policies
    pairs = [(policy, first) for policy in others] + [(b, a) for a, b in combinations(others, 2)]
    found = (
        compare_policies(policy, other, decoding, name, prompts, seed)
        for policy, other in pairs
        for decoding in DECODINGS
        for name in [*scores(policies), *UNSCORED[decoding]]
    )
    return tuple(one for one in found if one is not None)


def scores(policies: Sequence[PolicySamples]) -> list[str]:
    """Return the names of the scores: the reward, its components if there are several, the judge's.

    A component or a part of the judge's verdict is named "reward/NAME" or "judge/NAME".
    """
    found = [s for policy in policies for d in DECODINGS for s in policy.samples[d]]
    parts = list(found[0]["parts"])
    judged = sorted({part for sample in found for part in sample["judge"]})
    components = [f"{REWARD}/{part}" for part in parts] if len(parts) > 1 else []
    return [REWARD, *components, *(f"judge/{part}" for part in judged)]


def compare_policies(
    policy: PolicySamples,
    other: PolicySamples,
    decoding: Decoding,
    number: str,
    prompts: int,
    seed: int,
) -> Comparison | None:
    """Return the comparison of one number; None where no prompt has it in both policies."""
    ours, theirs = (values(p.samples[decoding], number, prompts) for p in (policy, other))
    difference = row_means(ours) - row_means(theirs)
    known = ~np.isnan(difference)
    if not known.any():
        return None
    difference = difference[known]
    paired = np.where(ours == theirs, 0.5, (ours > theirs).astype(float))
    paired[np.isnan(ours) | np.isnan(theirs)] = np.nan
    wins = row_means(paired)
    ties = row_means(np.where(np.isnan(paired), np.nan, paired == 0.5))
    is_scored, won = number not in UNSCORED[decoding], wins[~np.isnan(wins)]
    has_interval = len(difference) > 1
    return Comparison(
        policy=policy.name,
        other=other.name,
        decoding=decoding,
        number=number,
        prompts=len(difference),
        difference=float(difference.mean()),
        interval=single(mean_interval(difference, seed)) if has_interval else None,
        win_rate=float(won.mean()) if is_scored and len(won) else None,
        win_interval=single(rate_interval(won, seed)) if is_scored and len(won) > 1 else None,
        ties=float(ties[~np.isnan(ties)].mean()) if is_scored and len(won) else None,
    )


def values(samples: Sequence[Sample], number: str, prompts: int) -> Float[ndarray, "N n"]:
    """Return a number of every sample, one row a prompt; NaN where a sample has none."""
    return number_column(samples, number).reshape(prompts, -1)


def number_column(samples: Sequence[Sample], number: str) -> Float[ndarray, " S"]:
    """Return a number of every sample; NaN where a sample has none.

    number: name as in `Comparison`, or another key of a sample.
    """
    kind, _, part = number.partition("/")
    if number == REWARD:
        found = [s["score"] for s in samples]
    elif kind == REWARD:
        found = [s["parts"].get(part) for s in samples]
    elif kind == "judge":
        found = [s["judge"].get(part) for s in samples]
    else:
        found = [s.get(number) for s in samples]
    return np.array([np.nan if x is None else x for x in found], float)


def row_means(x: Float[ndarray, "N n"]) -> Float[ndarray, " N"]:
    """Return the mean of each row over the values that are not NaN; NaN where there are none."""
    known = ~np.isnan(x)
    with np.errstate(invalid="ignore"):
        return np.where(known, x, 0).sum(axis=1) / known.sum(axis=1)


def passes(
    policies: Sequence[PolicySamples], prompts: int, ks: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Return the mean over prompts of pass@k of the sampled responses.

    Returns: policy -> "eval/pass@<k>/<score>" -> the mean.

    Only scores that are 0 or 1 in every response of every policy have one. A prompt counts where at
    least k of its responses have the score.
    """
    found: dict[str, dict[str, float]] = {policy.name: {} for policy in policies}
    for name in scores(policies):
        tables = [values(policy.samples["sampled"], name, prompts) for policy in policies]
        known = np.concatenate([table[~np.isnan(table)] for table in tables])
        if not np.isin(known, (0, 1)).all():
            continue
        for policy, table in zip(policies, tables, strict=True):
            rows = [row[~np.isnan(row)] == 1 for row in table]
            for k in ks:
                if usable := [pass_at_k(row.tolist(), k) for row in rows if len(row) >= k]:
                    found[policy.name][f"{PASS}{k}/{name}"] = fmean(usable)
    return found


def pass_at_k(passed: Sequence[bool], k: int) -> float:
    """Return the unbiased estimate of the probability that one of k responses passes.

        pass@k = 1 - C(n - c, k) / C(n, k), with n responses of which c pass; k <= n

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1
    """
    n, c = len(passed), sum(passed)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_of(samples: Sequence[Sample], n: int, count: int) -> list[Sample]:
    """Return the sample of the highest score of each n, the first of equal ones.

    samples: n * count samples of each prompt, one prompt after the other. The KL of a returned
    sample is that of best-of-n to the policy of the samples, as its prompt's scores estimate it.
    """
    found: list[Sample] = []
    for start in range(0, len(samples), n * count):
        group = samples[start : start + n * count]
        kl = best_of_kl([s["score"] for s in group], n)
        found += [
            {**max(group[i : i + n], key=lambda s: s["score"]), "kl": kl}
            for i in range(0, len(group), n)
        ]
    return found
