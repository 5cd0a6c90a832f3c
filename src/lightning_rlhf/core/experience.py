"""(Rollout, Scores) -> advantages -> Experience -> shuffled minibatches. Pure functions.

The estimators of advantages are GAE, REINFORCE++, RLOO, GRPO and Dr. GRPO.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rlhf.core import kl, masking, records, shaping
from lightning_rlhf.core.config import PPOConfig, Term


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Compute generalised advantage estimation over right-padded responses.

        delta_t = r_t + gamma * V_{t+1} - V_t          V after the last real token is 0
        A_t     = delta_t + gamma * gae_lambda * A_{t+1}
        R_t     = A_t + V_t

    gae_lambda 1 gives the Monte-Carlo return minus the value, 0 the one-step error. A response
    that was cut at its maximum length is treated as ended: no value is bootstrapped after it.

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


def rewards_to_go(
    rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, gamma: float
) -> Float[Tensor, "B T"]:
    """Return the discounted sum of each token's and all later rewards: R_t = r_t + gamma * R_{t+1}.

    It equals GAE with gae_lambda 1 and all values 0. Whitened over the batch it is the advantage of
    REINFORCE++. It is 0 on padding. Source: Hu et al. 2025, https://arxiv.org/abs/2501.03262
    """
    advantages, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0)
    return advantages


def leave_one_out(returns: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """Return each response's return minus the mean of the others to the same prompt (RLOO).

        A_i = R_i - mean_{j != i} R_j

    returns: returns of whole responses; each `group_size` in a row answer one prompt.
    Source: Ahmadian et al. 2024, eq. 9, https://arxiv.org/abs/2402.14740
    """
    groups = returns.view(-1, group_size)
    others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others).flatten()


def group_centered(returns: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """Return each response's return minus the mean of its group (Dr. GRPO).

    This is leave-one-out times (1 - 1/G), where G is `group_size`.

    Source: Liu et al. 2025, section 3, https://arxiv.org/abs/2503.20783
    """
    groups = returns.view(-1, group_size)
    return (groups - groups.mean(dim=1, keepdim=True)).flatten()


def group_normalised(returns: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """Return each response's return, standardised within its group (GRPO).

        A_i = (R_i - mean R) / (std R + 1e-4)     a group all alike gets 0

    std is that of a sample, over group_size - 1, as in other codebases; the paper does not say
    which.
    Source: Shao et al. 2024, section 4.1.2, https://arxiv.org/abs/2402.03300
    """
    # fp32 rounding could separate equal returns, and not every device has float64.
    groups = returns.cpu().double().view(-1, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    deviation = groups.std(dim=1, keepdim=True)
    return (centered / (deviation + 1e-4)).flatten().to(returns)


BY_GROUP = {"rloo": leave_one_out, "grpo": group_normalised, "dr_grpo": group_centered}


def make_experience(
    rollout: records.Rollout,
    scores: records.Scores,
    config: PPOConfig,
    rewards: Float[Tensor, "B T"],
) -> records.Experience:
    """Return the Experience that PPO's update needs, from a rollout and its scores.

    rewards: reward of each response token, 0 on padding, as `token_rewards`.
    """
    mask = rollout.response_mask
    if config.whiten_rewards:
        rewards = masking.masked_rescale(rewards, mask)
    advantages, returns = estimate(rewards, rollout, config)
    if config.whiten_advantages == "batch":
        advantages = masking.masked_whiten(advantages, mask)
    return records.Experience(
        tokens=rollout.tokens,
        mask=rollout.mask,
        response_mask=mask,
        old_logprobs=rollout.logprobs,
        old_values=rollout.values,
        ref_logprobs=scores.ref_logprobs,
        kl=torch.where(mask, kl.k1(rollout.logprobs, scores.ref_logprobs), 0),
        rewards=rewards,
        advantages=advantages,
        returns=returns,
        component_scores=scores.component_scores,
        score=scores.score,
        ended=rollout.ended,
        index=rollout.index,
        sampler_logprobs=rollout.sampler_logprobs,
    )


def token_rewards(
    rollout: records.Rollout,
    scores: records.Scores,
    config: PPOConfig,
    *,
    kl_coef: float,
    moments: shaping.ScoreMoments,
    terms: Sequence[Term] = shaping.AS_IT_IS,
) -> Float[Tensor, "B T"]:
    """Return the reward of each response token: `shape_rewards` of the shaped score and its parts.

    It is 0 on padding.

    kl_coef: KL coefficient of the iteration.
    moments: moments of all scores so far, this batch included.
    terms: weights and normalizations with which the components of the reward enter the score.
    """
    mask = rollout.response_mask
    paid = shaping.paid_sum(scores.component_scores, terms, moments.components)
    score = shaping.shape_score(paid, rollout.ended, mask.sum(dim=1), config, moments.whole)
    parts, priced = None, torch.zeros_like(rollout.logprobs)
    if scores.token_scores is not None:
        parts = shaping.paid_parts(scores.token_scores, rollout.ended, terms, config, moments)
    if config.kl_in == "reward":
        priced = kl.priced(config, rollout.logprobs, scores.ref_logprobs, scores.vocabulary_kl)
    return shaping.shape_rewards(score, priced, mask, kl_coef=kl_coef, parts=parts)


def estimate(
    rewards: Float[Tensor, "B T"], rollout: records.Rollout, config: PPOConfig
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
    experience: records.Experience, ppo_epochs: int, minibatch_size: int, generator: torch.Generator
) -> Iterator[records.Experience]:
    """Yield every sequence once in each of `ppo_epochs` passes, in a new order each pass.

    They have their `counts`, which are read from the device at once.
    """
    experience = replace(experience, counts=records.row_lengths(experience).cpu())
    for _ in range(ppo_epochs):
        order = torch.randperm(len(experience), generator=generator)
        yield from experience.select(order).split(minibatch_size)


def whitened(minibatch: records.Experience) -> records.Experience:
    """Return the minibatch with its advantages shifted and scaled to mean 0 and variance 1."""
    advantages = masking.masked_whiten(minibatch.advantages, minibatch.response_mask)
    return replace(minibatch, advantages=advantages)
