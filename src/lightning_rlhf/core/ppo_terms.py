"""Terms of PPO's loss on one micro-batch, from the predictions of the models. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_rlhf.core.kl import ESTIMATORS, k3
from lightning_rlhf.core.losses import (
    policy_is_clipped,
    policy_loss,
    value_is_clipped,
    value_loss,
)
from lightning_rlhf.core.masking import picker
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.types import Experience, PPOTerms, known_mask


@dataclass(frozen=True, kw_only=True)
class PolicyOutputs:
    """Predictions of the policy at the real response tokens of a micro-batch, row by row."""

    logprobs: Float[Tensor, " N"]
    """Log-probability of each token, nats."""
    entropy: Float[Tensor, " N"]
    """Entropy of the distribution that each token is drawn from, nats."""
    vocabulary_kl: Float[Tensor, " N"] | None
    """KL to the reference over the whole vocabulary, nats; None unless ppo.kl_in=loss uses it."""


def ppo_terms(
    batch: Experience,
    weights: Float[Tensor, "B T"],
    tokens: Int[Tensor, ""],
    config: PPOConfig,
    *,
    kl_coef: float,
    policy: PolicyOutputs | None,
    values: Float[Tensor, " N"] | None,
) -> PPOTerms:
    """Return the loss of one micro-batch and its statistics, as shares of the minibatch's.

        loss = sum_t w_t (policy_loss_t + kl_coef kl_t - ent_coef entropy_t + vf_coef value_loss_t)

    The losses weigh each token by w; entropy, KL, ratio and the clipped shares are means over the
    tokens of the minibatch. What has no term, policy or values, contributes 0 to all of them; so
    does ptx_loss, which is that of other texts.

    Args:
        batch: the micro-batch, a slice of the minibatch.
        weights: the same slice of `token_weights` of the minibatch.
        tokens: real response tokens of the whole minibatch.
        kl_coef: price of the KL to the reference in this iteration, used where ppo.kl_in=loss.
        policy: predictions of the policy; None where the critic is updated by itself.
        values: V(s_t) of the critic at each real response token; None without a critic, and where
            the policy is updated by itself.
    """
    pick = picker(known_mask(batch))
    weight = pick(weights)
    loss = zeros = torch.zeros_like(weight)
    policy_losses = kl_losses = value_losses = zeros
    entropy = approx_kl = ratio = policy_clipped = value_clipped = zeros
    if policy is not None:
        old_logprobs = pick(batch.old_logprobs)
        clip_range, clip_range_high = config.clip_range, config.clip_range_high
        policy_losses = policy_loss(
            policy.logprobs, old_logprobs, pick(batch.advantages),
            clip_range=clip_range, clip_range_high=clip_range_high, dual_clip=config.dual_clip,
        )  # fmt: skip
        kl_losses = kl_loss(policy, batch, config)
        loss = policy_losses + kl_coef * kl_losses
        entropy = policy.entropy
        if config.ent_coef > 0:
            loss = loss - config.ent_coef * entropy
        with torch.no_grad():
            approx_kl = k3(old_logprobs, policy.logprobs)
            ratio = torch.exp(policy.logprobs - old_logprobs)
            policy_clipped = policy_is_clipped(
                ratio, clip_range=clip_range, clip_range_high=clip_range_high
            ).float()
    if values is not None:
        old_values, clip_range_vf = pick(batch.old_values), config.clip_range_vf
        value_losses = value_loss(
            values, old_values, pick(batch.returns), clip_range_vf=clip_range_vf
        )
        loss = loss + config.vf_coef * value_losses
        value_clipped = value_is_clipped(values, old_values, clip_range_vf=clip_range_vf).float()
    return PPOTerms(
        loss=(weight * loss).sum(),
        policy_loss=(weight * policy_losses.detach()).sum(),
        kl_loss=(weight * kl_losses.detach()).sum(),
        value_loss=(weight * value_losses.detach()).sum(),
        ptx_loss=weight.new_zeros(()),
        entropy=entropy.detach().sum() / tokens,
        approx_kl=approx_kl.sum() / tokens,
        clip_fraction=policy_clipped.sum() / tokens,
        value_clip_fraction=value_clipped.sum() / tokens,
        ratio_mean=ratio.sum() / tokens,
        ratio_max=ratio.max(),
    )


def kl_loss(policy: PolicyOutputs, batch: Experience, config: PPOConfig) -> Float[Tensor, " N"]:
    """Return the KL to the reference that ppo.kl_in=loss adds, nats a token; else 0."""
    if config.kl_in == "reward":
        return torch.zeros_like(policy.logprobs)
    if config.kl_estimator == "full":
        assert policy.vocabulary_kl is not None
        return policy.vocabulary_kl
    estimator = ESTIMATORS[config.kl_estimator]
    return estimator(policy.logprobs, picker(known_mask(batch))(batch.ref_logprobs))


def sum_terms(terms: Sequence[PPOTerms]) -> PPOTerms:
    """Return the terms of all micro-batches together: sums of shares, the largest of ratio_max."""
    columns = {f.name: torch.stack([getattr(t, f.name) for t in terms]) for f in fields(PPOTerms)}
    largest = columns.pop("ratio_max").max()
    return PPOTerms(ratio_max=largest, **{name: shares.sum() for name, shares in columns.items()})
