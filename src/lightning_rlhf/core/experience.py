"""(Rollout, Scores) -> Experience -> shuffled minibatches. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightning_rlhf.core.advantages import gae
from lightning_rlhf.core.config import PPOConfig
from lightning_rlhf.core.kl import k1
from lightning_rlhf.core.masking import masked_whiten
from lightning_rlhf.core.shaping import apply_missing_eos, shape_rewards
from lightning_rlhf.core.types import Experience, Rollout, Scores


def make_experience(rollout: Rollout, scores: Scores, config: PPOConfig) -> Experience:
    """Everything that PPO's update needs, from what was sampled and what the frozen models say."""
    mask = rollout.response_mask
    kl = torch.where(mask, k1(rollout.logprobs, scores.ref_logprobs), 0)
    score = apply_missing_eos(
        scores.score, rollout.ended, config.missing_eos, config.missing_eos_penalty
    )
    rewards = shape_rewards(score, kl, mask, kl_coef=config.kl_coef)
    advantages, returns = gae(
        rewards, rollout.values, mask, gamma=config.gamma, gae_lambda=config.gae_lambda
    )
    if config.whiten_advantages:
        advantages = masked_whiten(advantages, mask)
    return Experience(
        tokens=rollout.tokens,
        mask=rollout.mask,
        response_mask=mask,
        old_logprobs=rollout.logprobs,
        old_values=rollout.values,
        kl=kl,
        rewards=rewards,
        advantages=advantages,
        returns=returns,
        score=scores.score,
        ended=rollout.ended,
        index=rollout.index,
    )


def minibatches(
    experience: Experience, *, ppo_epochs: int, minibatch_size: int, generator: torch.Generator
) -> Iterator[Experience]:
    """Every sequence once in each of `ppo_epochs` passes, in a new order each pass."""
    for _ in range(ppo_epochs):
        order = torch.randperm(len(experience), generator=generator)
        yield from experience.select(order.to(experience.tokens.device)).split(minibatch_size)
