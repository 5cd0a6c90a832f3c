"""Reward model with a scalar head on the hidden state of the last real token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_rlhf.core.device_memory import MicrobatchSize
from lightning_rlhf.core.masking import by_length
from lightning_rlhf.core.types import DecodedResponses

TokenRewards = Callable[[Int[Tensor, "B S"], Bool[Tensor, "B S"]], Float[Tensor, "B H"]]
"""Function from (tokens, mask) to the number of each of H heads for each row."""


@dataclass(frozen=True)
class LearnedReward:
    """Standardised reward of token sequences: (r - mean) / std - uncertainty_coef * u.

    The sequences are read as the policy wrote them. r and u are mean and population standard
    deviation over the heads of an ensemble, u in units of std. A Bradley-Terry reward is defined up
    to a constant and has an arbitrary scale; mean and std were measured on SFT samples at the end
    of stage=rm, so that the SFT model's mean reward is 0.
    """

    rewards: TokenRewards
    """Reward model, as a function from (tokens, mask) to the number of each head for each row."""
    mean: float
    """Mean of the raw reward over SFT samples."""
    std: float
    """Standard deviation of the raw reward over SFT samples."""
    uncertainty_coef: float
    """Weight of the deviation between the heads of an ensemble."""
    batch_size: MicrobatchSize
    """Number of rows that are read at once; rows of similar lengths are read together."""
    module: nn.Module | None = None
    """Model that `rewards` computes with; None where it is not known."""
    role: str = ""
    """Role in which `module` reads."""

    @torch.no_grad()
    def __call__(self, decoded: DecodedResponses) -> Float[Tensor, " B"]:
        rollout = decoded.rollout
        order = by_length(rollout.mask)
        parts = self.batch_size.fitting(
            lambda size: [
                self.rewards(rollout.tokens[rows], rollout.mask[rows]) for rows in order.split(size)
            ]
        )
        rewards = torch.cat(parts)[order.argsort()]
        return standardised(rewards, self.mean, self.std, self.uncertainty_coef)


def standardised(
    rewards: Float[Tensor, "B H"], mean: float, std: float, uncertainty_coef: float
) -> Float[Tensor, " B"]:
    """Return (r - mean - uncertainty_coef * u) / std; r and u: mean and deviation over the
    heads."""
    spread, reward = torch.std_mean(rewards, dim=1, correction=0)
    return (reward - mean - uncertainty_coef * spread) / std
