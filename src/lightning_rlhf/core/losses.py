"""Losses per token or per pair, unreduced: the caller names the denominator."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def bradley_terry_loss(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Negative log-likelihood that the chosen response wins; lower is better, log 2 at a tie.

        -log sigmoid(r_chosen - r_rejected)

    Source: Ouyang et al. 2022, eq. 1, https://arxiv.org/abs/2203.02155
    """
    return -F.logsigmoid(chosen - rejected)


def centering_loss(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Squared distance of a pair's rewards from 0; lower is better.

        (r_chosen + r_rejected)^2

    Bradley-Terry leaves an offset free for every prompt. PPO would meet it as noise: this pins it.
    Source: Eisenstein et al. 2023, section 2, https://arxiv.org/abs/2312.09244
    """
    return (chosen + rejected) ** 2


def policy_loss(
    logprobs: Float[Tensor, ...],
    old_logprobs: Float[Tensor, ...],
    advantages: Float[Tensor, ...],
    *,
    clip_range: float,
) -> Float[Tensor, ...]:
    """PPO's clipped surrogate, negated: lower is better.

        ratio = exp(logprobs - old_logprobs)
        max(-A * ratio, -A * clip(ratio, 1 - clip_range, 1 + clip_range))

    A token whose ratio has already gone further than clip_range in the direction its advantage
    asks for has no gradient. Source: Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def value_loss(
    values: Float[Tensor, ...],
    old_values: Float[Tensor, ...],
    returns: Float[Tensor, ...],
    *,
    clip_range_vf: float,
) -> Float[Tensor, ...]:
    """Squared error of the critic, with its step away from the old value bounded.

        v_clip = old + clip(V - old, -clip_range_vf, clip_range_vf)
        0.5 * max((V - R)^2, (v_clip - R)^2)

    Source: Huang et al. 2022, detail 9, https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
    """
    clipped = old_values + (values - old_values).clamp(-clip_range_vf, clip_range_vf)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
