"""(Rollout, Scores) -> Experience -> shuffled minibatches. Pure functions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.advantages import (
    gae,
    group_centered,
    group_normalised,
    leave_one_out,
    rewards_to_go,
)
from lightning_rlhf.core.config import PPOConfig, Term
from lightning_rlhf.core.kl import ESTIMATORS, k1
from lightning_rlhf.core.masking import masked_rescale, masked_whiten
from lightning_rlhf.core.records import Experience, Rollout, Scores
from lightning_rlhf.core.shaping import AS_IT_IS, ScoreMoments, paid_sum, shape_rewards, shape_score

BY_GROUP = {"rloo": leave_one_out, "grpo": group_normalised, "dr_grpo": group_centered}


def make_experience(
    rollout: Rollout,
    scores: Scores,
    config: PPOConfig,
    rewards: Float[Tensor, "B T"],
) -> Experience:
    """Return the Experience that PPO's update needs, from a rollout and its scores.

    rewards: reward of each response token, 0 on padding, as `token_rewards`.
    """
    mask = rollout.response_mask
    if config.whiten_rewards:
        rewards = masked_rescale(rewards, mask)
    advantages, returns = estimate(rewards, rollout, config)
    if config.whiten_advantages == "batch":
        advantages = masked_whiten(advantages, mask)
    return Experience(
        tokens=rollout.tokens,
        mask=rollout.mask,
        response_mask=mask,
        old_logprobs=rollout.logprobs,
        old_values=rollout.values,
        ref_logprobs=scores.ref_logprobs,
        kl=torch.where(mask, k1(rollout.logprobs, scores.ref_logprobs), 0),
        rewards=rewards,
        advantages=advantages,
        returns=returns,
        component_scores=scores.component_scores,
        score=scores.score,
        ended=rollout.ended,
        index=rollout.index,
    )


def token_rewards(
    rollout: Rollout,
    scores: Scores,
    config: PPOConfig,
    *,
    kl_coef: float,
    moments: ScoreMoments,
    terms: Sequence[Term] = AS_IT_IS,
) -> Float[Tensor, "B T"]:
    """Return the reward of each response token: `shape_rewards` of the shaped score; 0 on padding.

    kl_coef: KL coefficient of the iteration.
    moments: moments of all scores so far, this batch included.
    terms: weights and normalizations with which the components of the reward enter the score.
    """
    mask = rollout.response_mask
    paid = paid_sum(scores.component_scores, terms, moments.components)
    score = shape_score(paid, rollout.ended, mask.sum(dim=1), config, moments.whole)
    if config.kl_in == "reward":
        return shape_rewards(score, priced_kl(rollout, scores, config), mask, kl_coef=kl_coef)
    return shape_rewards(score, torch.zeros_like(rollout.logprobs), mask, kl_coef=0.0)


def priced_kl(rollout: Rollout, scores: Scores, config: PPOConfig) -> Float[Tensor, "B T"]:
    """Return the KL to the reference that ppo.kl_coef multiplies, nats a token."""
    if config.kl_estimator == "full":
        assert scores.vocabulary_kl is not None
        return scores.vocabulary_kl
    return ESTIMATORS[config.kl_estimator](rollout.logprobs, scores.ref_logprobs)


def estimate(
    rewards: Float[Tensor, "B T"], rollout: Rollout, config: PPOConfig
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Return the advantages by the estimator ppo.advantage, and the returns; both 0 on padding.

    Estimators that compare responses to one prompt give all tokens of a response the same value.
    """
    mask = rollout.response_mask
    if config.advantage == "gae":
        return gae(rewards, rollout.values, mask, gamma=config.gamma, gae_lambda=config.gae_lambda)
    returns = rewards_to_go(rewards, mask, gamma=config.gamma)
    if config.advantage == "reinforce++":
        return returns, returns
    whole = BY_GROUP[config.advantage](returns[:, 0], config.samples_per_prompt)
    return torch.where(mask, whole[:, None], 0), returns


def minibatches(
    experience: Experience, *, ppo_epochs: int, minibatch_size: int, generator: torch.Generator
) -> Iterator[Experience]:
    """Yield every sequence once in each of `ppo_epochs` passes, in a new order each pass."""
    for _ in range(ppo_epochs):
        order = torch.randperm(len(experience), generator=generator)
        yield from experience.select(order).split(minibatch_size)


def whitened(minibatch: Experience) -> Experience:
    """Return the minibatch with its advantages shifted and scaled to mean 0 and variance 1."""
    advantages = masked_whiten(minibatch.advantages, minibatch.response_mask)
    return replace(minibatch, advantages=advantages)
