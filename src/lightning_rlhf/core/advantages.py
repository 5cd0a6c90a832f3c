"""How much better an action was than the critic expected."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimation over right-padded responses.

        delta_t = r_t + gamma * V_{t+1} - V_t          V after the last real token is 0
        A_t     = delta_t + gamma * gae_lambda * A_{t+1}
        R_t     = A_t + V_t

    gae_lambda 1 gives the Monte-Carlo return minus the value, 0 the one-step error. A response
    that ran out of room is treated as ended: what it was worth is what its score says.

    Returns: advantages and returns (the critic's targets), both 0 on padding.
    Source: Schulman et al. 2015, eq. 11-16, https://arxiv.org/abs/1506.02438
    """
    rewards = torch.where(mask, rewards, 0)
    values = torch.where(mask, values, 0)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * gae_lambda * next_advantage, 0)
        advantages[:, t] = next_advantage
        next_value = values[:, t]
    return advantages, torch.where(mask, advantages + values, 0)
