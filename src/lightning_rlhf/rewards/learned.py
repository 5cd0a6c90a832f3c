"""A reward model: a scalar head on the last real token's hidden state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rlhf.core.types import Rollout

Reward = Callable[[Int[Tensor, "B S"], Bool[Tensor, "B S"]], Float[Tensor, " B"]]


@dataclass(frozen=True)
class LearnedReward:
    """Standardised reward of whole sequences: (r - mean) / std.

    A Bradley-Terry reward is defined up to a constant and has a scale of its own; mean and std
    were measured on SFT samples at the end of stage=rm, so that 0 is what the SFT model gets.
    """

    reward: Reward
    """(tokens, mask) -> the reward model's raw number for each row."""
    mean: float
    std: float

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Float[Tensor, " B"]:
        return (self.reward(rollout.tokens, rollout.mask) - self.mean) / self.std
