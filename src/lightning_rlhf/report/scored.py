"""Pairs, samples and probes with their scores: the input of a fitness report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lightning_rlhf.core.errors import DataError, RewardError
from lightning_rlhf.rewards.probes import ProbeKind


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
            if not math.isfinite(score):
                raise RewardError(
                    f"pair {number}: the score of its {side} response is {score}; a reward source "
                    f"has to give a finite number. Its prompt: {pair.prompt[:80]!r}"
                )
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


def check_samples(samples: Sequence[ScoredSample]) -> None:
    """Check that all scores are finite numbers.

    Raises:
        RewardError: a score is not a finite number; names the sample.
    """
    for number, sample in enumerate(samples, start=1):
        if not math.isfinite(sample.score):
            raise RewardError(
                f"SFT sample {number}: its score is {sample.score}; a reward source has to give a "
                "finite number"
            )
