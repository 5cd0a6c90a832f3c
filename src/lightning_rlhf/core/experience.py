"""(Rollout, Scores) -> advantages -> Experience -> shuffled minibatches. Pure functions.

An estimator of advantages is a function of an `AdvantageBatch`, which `ADVANTAGES` has by its name.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rlhf.core import kl, masking, ppo_config, records, shaping
from lightning_rlhf.core.config import Term


@dataclass(frozen=True, kw_only=True)
class AdvantageBatch:
    """All B responses of an iteration, of at most T tokens, that advantages are computed for.

    Each config.samples_per_prompt rows in a row answer one prompt.
    """

    rewards: Float[Tensor, "B T"]
    """Reward of each token: shaped score at the last token, minus the KL penalty if ppo.kl_in is
    reward; whitened if ppo.whiten_rewards says so; 0 on padding."""
    values: Float[Tensor, "B T"]
    """V(s_t) of the critic, in units of reward; 0 on padding and without a critic."""
    mask: Bool[Tensor, "B T"]
    """True on response tokens, the end token included."""
    component_scores: Float[Tensor, "B K"]
    """Number that each component of the reward gives the whole response, before any shaping."""
    weights: Float[Tensor, " K"]
    """Factor with which each component enters the score."""
    baseline: Float[Tensor, " B"]
    """Return that was to be expected of each response: with remax that of the greedy response to
    its prompt, with reinforce the moving average over the iterations before; 0 for others."""
    config: ppo_config.PPOConfig
    """Section of the stage, with gamma and the other keys."""

    @cached_property
    def returns(self) -> Float[Tensor, "B T"]:
        """Return the discounted rewards to go of each token; 0 on padding. The first is a row's."""
        return rewards_to_go(self.rewards, self.mask, gamma=self.config.gamma)


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of an `AdvantageBatch`, and targets of its critic; on padding finite."""

    advantages: Float[Tensor, "B T"]
    """Advantage of each response token, before it is whitened; above 0 makes it likelier."""
    returns: Float[Tensor, "B T"] | None = None
    """Targets of the critic; None for `AdvantageBatch.returns`, where there is no critic."""


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
    gae_lambda: float | Float[Tensor, " B"],
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Compute generalised advantage estimation over right-padded responses.

        delta_t = r_t + gamma * V_{t+1} - V_t          V after the last real token is 0
        A_t     = delta_t + gamma * gae_lambda * A_{t+1}
        R_t     = A_t + V_t

    gae_lambda 1 gives the Monte-Carlo return minus the value, 0 the one-step error; a tensor has
    one for each response. A response that was cut at its maximum length is treated as ended: no
    value is bootstrapped after it.

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


def with_critic(batch: AdvantageBatch) -> Advantages:
    """Return `gae`, where ppo says so with a lambda apart for the critic, or one by length.

        lambda_i = 1 - 1 / max(alpha * tokens_i, 1)     alpha = gae_lambda_alpha, if it is given

    gae_lambda_alpha: towards 0 the one-step error for all, large the Monte-Carlo return.
    gae_lambda_critic: that of the targets R_t; 1 = Monte-Carlo returns, 0 = one step.
    Source: Yuan et al. 2025, section 3.2, https://arxiv.org/abs/2503.01491 (apart); Yue et al. 2025
    (VAPO), section 4.2, https://arxiv.org/abs/2504.05118 (by length)
    """
    config, mask = batch.config, batch.mask
    run = partial(gae, batch.rewards, batch.values, mask, gamma=config.gamma)
    of_policy: float | Tensor = config.gae_lambda
    if config.gae_lambda_alpha is not None:
        tokens = mask.sum(dim=1).to(batch.rewards)
        of_policy = 1 - 1 / (config.gae_lambda_alpha * tokens).clamp(min=1)
    advantages, returns = run(gae_lambda=of_policy)
    if config.gae_lambda_critic is not None:
        _, returns = run(gae_lambda=config.gae_lambda_critic)
    return Advantages(advantages=advantages, returns=returns)


def above_baseline(batch: AdvantageBatch) -> Advantages:
    """Return rewards to go minus the baseline of the response, the same at each of its tokens.

        A_t = G_t - b        b is 0 for reinforce++, whose preset whitens over the batch

    Source: Williams 1992, https://doi.org/10.1007/BF00992696 (reinforce); Li et al. 2023,
    algorithm 1, https://arxiv.org/abs/2310.10505 (remax); Hu et al. 2025,
    https://arxiv.org/abs/2501.03262 (reinforce++)
    """
    advantages = batch.returns - batch.baseline[:, None]
    return Advantages(advantages=torch.where(batch.mask, advantages, 0))


def by_component(batch: AdvantageBatch) -> Advantages:
    """Return the weighted sum of components that are standardised each by itself (GDPO).

        S_i = sum_k w_k (c_ik - mean_group c_k) / (std_group c_k + 1e-4)
        A_i = (S_i - mean_batch S) / (std_batch S + 1e-4)

    A component of a large spread does not drown another, as it does in the sum that grpo
    standardises. A weight of 0 ignores a component, a large one all others. Rewards of tokens are
    not read.
    Source: Liu et al. 2026, section 3, https://arxiv.org/abs/2601.05242, as in TRL: over responses
    """
    parts = [
        group_normalised(one, batch.config.samples_per_prompt)
        for one in batch.component_scores.unbind(dim=1)
    ]
    total = (torch.stack(parts, dim=1) * batch.weights).sum(dim=1)
    whole = group_normalised(total, len(total))
    return Advantages(advantages=torch.where(batch.mask, whole[:, None], 0))


Estimator = Callable[[AdvantageBatch], Advantages]


def of_group(compare: Callable[[Float[Tensor, " B"], int], Float[Tensor, " B"]]) -> Estimator:
    """Return the estimator that gives each token the comparison of its response with the group."""

    def estimator(batch: AdvantageBatch) -> Advantages:
        whole = compare(batch.returns[:, 0], batch.config.samples_per_prompt)
        return Advantages(advantages=torch.where(batch.mask, whole[:, None], 0))

    return estimator


ADVANTAGES: dict[str, Estimator] = {
    "gae": with_critic,
    "rloo": of_group(leave_one_out),
    "grpo": of_group(group_normalised),
    "dr_grpo": of_group(group_centered),
    "gdpo": by_component,
    "reinforce++": above_baseline,
    "reinforce": above_baseline,
    "remax": above_baseline,
}
"""Value of ppo.advantage -> estimator; a run adds the one of the user's that it names."""


def make_experience(
    rollout: records.Rollout,
    scores: records.Scores,
    config: ppo_config.PPOConfig,
    rewards: Float[Tensor, "B T"],
    *,
    terms: Sequence[Term] = shaping.AS_IT_IS,
    baseline: Float[Tensor, " B"] | float = 0.0,
) -> records.Experience:
    """Return the Experience that PPO's update needs, from a rollout and its scores.

    rewards: reward of each response token, 0 on padding, as `token_rewards`.
    terms: weights with which the components of the reward enter the score.
    baseline: as in `AdvantageBatch`, or one number for all responses.
    """
    mask = rollout.response_mask
    if config.whiten_rewards:
        rewards = masking.masked_rescale(rewards, mask)
    batch = AdvantageBatch(
        rewards=rewards,
        values=rollout.values,
        mask=mask,
        component_scores=scores.component_scores,
        weights=scores.component_scores.new_tensor([term.weight for term in terms]),
        baseline=torch.zeros_like(scores.score) + baseline,
        config=config,
    )
    found = ADVANTAGES[config.advantage](batch)
    advantages = torch.where(mask, found.advantages, 0)
    returns = batch.returns if found.returns is None else torch.where(mask, found.returns, 0)
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
    config: ppo_config.PPOConfig,
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
    score = shaping.normalised_sum(scores.component_scores, terms, moments.components)
    score = shaping.shape_score(score, rollout.ended, mask.sum(dim=1), config, moments.whole)
    parts, token_kl = None, torch.zeros_like(rollout.logprobs)
    if scores.token_scores is not None:
        parts = shaping.reward_parts(scores.token_scores, rollout.ended, terms, config, moments)
    if config.kl_in == "reward":
        logprobs, ref_logprobs = rollout.logprobs, scores.ref_logprobs
        token_kl = kl.token_kl(config, logprobs, logprobs, ref_logprobs, scores.vocabulary_kl)
    return shaping.shape_rewards(score, token_kl, mask, kl_coef=kl_coef, parts=parts)


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
