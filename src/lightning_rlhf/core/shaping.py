"""From one score per response to one reward per token."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rlhf.core.config import MissingEOS
from lightning_rlhf.core.errors import ConfigError


def apply_missing_eos(
    score: Float[Tensor, " B"], ended: Bool[Tensor, " B"], rule: MissingEOS, penalty: float
) -> Float[Tensor, " B"]:
    """The score after the rule for responses that never ended.

    "none" leaves it, "subtract" takes `penalty` off, "replace" puts `-penalty` in its place.
    Source: "replace" as in Stiennon et al. 2020 and Huang et al. 2024, section 3.4,
    https://arxiv.org/abs/2403.17031
    """
    match rule:
        case "none":
            return score
        case "subtract":
            return torch.where(ended, score, score - penalty)
        case "replace":
            return torch.where(ended, score, -penalty)
        case _:
            raise ConfigError(f"ppo.missing_eos is {rule!r}; allowed: none, subtract, replace")


def shape_rewards(
    score: Float[Tensor, " B"],
    kl: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    kl_coef: float,
) -> Float[Tensor, "B T"]:
    """Per-token rewards: a penalty for leaving the reference, and the score at the last token.

        r_t = -kl_coef * kl_t + [t is the last real token] * score

    kl_coef 0 means no leash. Returns 0 on padding.
    Source: Ziegler et al. 2019, eq. 2, https://arxiv.org/abs/1909.08593
    """
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, position, -1).amax(dim=1, keepdim=True)
    rewards = -kl_coef * kl + torch.where(position == last, score[:, None], 0)
    return torch.where(mask, rewards, 0)
