"""The scale of a reward model, measured on what it will be asked about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lightning_rlhf.core.types import Prompts
from lightning_rlhf.models.roles import REFERENCE, Roles
from lightning_rlhf.rollout.generate import generate


@torch.no_grad()
def reward_moments(
    roles: Roles,
    batches: Iterable[Prompts],
    *,
    max_response_tokens: int,
    temperature: float,
    end_token_ids: Sequence[int],
    generator: torch.Generator,
) -> tuple[float, float]:
    """Mean and standard deviation of the raw reward on samples of the reference, the SFT model."""
    rewards = []
    for prompts in batches:
        with roles.acting(REFERENCE):
            rollout = generate(
                roles,
                prompts.to(roles.device),
                value=lambda hidden: hidden.new_zeros(len(hidden), dtype=torch.float32),
                max_response_tokens=max_response_tokens,
                temperature=temperature,
                end_token_ids=end_token_ids,
                generator=generator,
            )
        rewards.append(roles.reward(rollout.tokens, rollout.mask).cpu())
    std, mean = torch.std_mean(torch.cat(rewards))
    return float(mean), float(std)
