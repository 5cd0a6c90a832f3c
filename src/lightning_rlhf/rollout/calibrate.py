"""The scale of a reward model, measured on what it will be asked about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.types import Prompts, Rollout
from lightning_rlhf.models.roles import REFERENCE, Roles
from lightning_rlhf.rollout import generate as native
from lightning_rlhf.rollout import hf
from lightning_rlhf.rollout.generate import no_value


def sample_reference(
    roles: Roles,
    batches: Iterable[Prompts],
    *,
    max_response_tokens: int,
    temperature: float,
    end_token_ids: Sequence[int],
    generator: torch.Generator,
) -> list[Rollout]:
    """Responses of the SFT model, on the CPU.

    To be drawn before a reward model is trained: full fine-tuning changes the weights that speak.
    """
    generate = native.generate if roles.caches else hf.generate
    with roles.acting(REFERENCE):
        return [
            generate(
                roles,
                prompts.to(roles.device),
                value=no_value,
                max_response_tokens=max_response_tokens,
                temperature=temperature,
                end_token_ids=end_token_ids,
                generator=generator,
            ).to("cpu")
            for prompts in batches
        ]


@torch.no_grad()
def sample_rewards(roles: Roles, rollouts: Iterable[Rollout]) -> Float[Tensor, " B"]:
    """The raw reward of each response, on the CPU."""
    rewards = [
        roles.reward(rollout.tokens.to(roles.device), rollout.mask.to(roles.device)).cpu()
        for rollout in rollouts
    ]
    return torch.cat(rewards)


def reward_moments(rewards: Float[Tensor, " B"]) -> tuple[float, float]:
    """Mean and standard deviation, by which a reward is standardised.

    Raises CheckpointError where the deviation is 0 or not finite.
    """
    std, mean = torch.std_mean(rewards)
    if not (std.isfinite() and std > 0):
        raise CheckpointError(
            f"the reward model gives SFT samples rewards of mean {mean} and standard deviation "
            f"{std}, which cannot be standardised; a smaller rm.lr or better pairs may help"
        )
    return float(mean), float(std)
