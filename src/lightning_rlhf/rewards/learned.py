"""A reward model: a scalar head on the last real token's hidden state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rlhf.core.device_memory import MicrobatchSize
from lightning_rlhf.core.masking import by_length
from lightning_rlhf.core.types import Replies

TokenRewards = Callable[[Int[Tensor, "B S"], Bool[Tensor, "B S"]], Float[Tensor, "B H"]]


@dataclass(frozen=True)
class LearnedReward:
    """Reward of whole sequences, as the policy wrote them: (r - mean) / std - uncertainty_coef * u.

    r and u are mean and population deviation over the heads of an ensemble, u in units of std.
    A Bradley-Terry reward is defined up to a constant and has a scale of its own; mean and std
    were measured on SFT samples at the end of stage=rm, so that 0 is what the SFT model gets.
    """

    rewards: TokenRewards
    """(tokens, mask) -> the number of each head for each row."""
    mean: float
    std: float
    uncertainty_coef: float
    batch_size: MicrobatchSize
    """Rows that are read at once, of alike lengths."""

    @torch.no_grad()
    def __call__(self, replies: Replies) -> Float[Tensor, " B"]:
        rollout = replies.rollout
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
    """(r - mean - uncertainty_coef * u) / std, r and u mean and deviation over the heads."""
    spread, reward = torch.std_mean(rewards, dim=1, correction=0)
    return (reward - mean - uncertainty_coef * spread) / std
