"""Advantage estimators: GAE, REINFORCE++, RLOO, GRPO and Dr. GRPO."""

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

        A_i = (R_i - mean R) / (std R + 1e-4)     population deviation; a group all alike gets 0

    Source: Shao et al. 2024, section 4.1.2, https://arxiv.org/abs/2402.03300
    Departs: the population's deviation, as in whitening here; the paper does not say which.
    """
    # fp32 rounding could separate equal returns, and not every device has float64.
    groups = returns.cpu().double().view(-1, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    deviation = groups.std(dim=1, correction=0, keepdim=True)
    return (centered / (deviation + 1e-4)).flatten().to(returns)
