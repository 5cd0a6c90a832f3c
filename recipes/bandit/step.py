"""The record of one iteration of the bandit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """Measurements of one iteration of one run, exact expectations under the policy."""

    clip_range: float
    """Clip range of the run."""
    kl_coef: float
    """KL coefficient of the run."""
    iteration: int
    """Number of the iteration, from 1."""
    expected_reward: float
    """Expected reward: mean over contexts of sum_a policy(a | c) mean[c, a]."""
    kl: float
    """KL(policy || reference), mean over contexts, nats."""
    update_size: float
    """KL(policy before || policy after) of this iteration, mean over contexts, nats."""
    best_arm: float
    """Probability of the best arm, mean over contexts."""
