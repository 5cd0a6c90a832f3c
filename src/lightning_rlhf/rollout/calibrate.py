"""The scale of a reward model, measured on responses of the SFT model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.types import SampledResponses
from lightning_rlhf.models.roles import REFERENCE, Roles
from lightning_rlhf.parallel.replicas import ONE, Replicas
from lightning_rlhf.rollout.dealt import DealtBatch, sample_mine
from lightning_rlhf.rollout.hf import HFSampler
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import SamplingParams


def sample_reference(
    roles: Roles,
    batches: Iterable[DealtBatch],
    params: SamplingParams,
    generator: torch.Generator,
    replicas: Replicas = ONE,
    role: str = REFERENCE,
) -> list[SampledResponses]:
    """Return the batches of responses of the SFT model that all processes sample, on the CPU.

    batches: batches of prompts, none of which is divided; role: role of the SFT model.
    Call it before a reward model is trained: full fine-tuning changes the SFT model's weights.
    """
    sampler = (NativeSampler if roles.caches else HFSampler)(roles, params)
    with roles.use_role(role):
        mine = [
            (int(numbers[0]), sampled.to("cpu"))
            for numbers, sampled in sample_mine(sampler, batches, generator)
        ]
    return replicas.merged(torch.tensor([first for first, _ in mine]), [part for _, part in mine])


@torch.no_grad()
def sample_rewards(roles: Roles, rollouts: Iterable[SampledResponses]) -> Float[Tensor, " B"]:
    """Return the raw reward of each response, on the CPU."""
    rewards = [
        roles.reward(rollout.tokens.to(roles.device), rollout.mask.to(roles.device)).cpu()
        for rollout in rollouts
    ]
    return torch.cat(rewards)


def reward_moments(rewards: Float[Tensor, " B"]) -> tuple[float, float]:
    """Return mean and standard deviation, by which a reward is standardised.

    Raises CheckpointError where the deviation is 0 or not finite.
    """
    std, mean = torch.std_mean(rewards)
    if not (std.isfinite() and std > 0):
        raise CheckpointError(
            f"the reward model gives SFT samples rewards of mean {mean} and standard deviation "
            f"{std}, which cannot be standardised; a smaller rm.lr or better pairs may help"
        )
    return float(mean), float(std)
