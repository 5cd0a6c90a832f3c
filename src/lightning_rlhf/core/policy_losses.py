"""Losses of the policy that ppo.policy_loss names, and trials of all formulas of the user's.

Losses are given rows of a minibatch and return a loss for each token; ppo.loss_reduction weighs the
tokens. Ratios are bounded as in `probability_ratio`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rlhf.core import experience, kl, losses, ppo_config


@dataclass(frozen=True, kw_only=True)
class PolicyBatch:
    """Responses that a loss of the policy is computed for: B rows of at most T tokens.

    It is a micro-batch, so the loss of a row must not depend on the other rows.
    """

    logprobs: Float[Tensor, "B T"]
    """Log-probability of each response token under the policy that is trained, nats; 0 on padding.
    The loss is differentiated with respect to it."""
    old_logprobs: Float[Tensor, "B T"]
    """The same under the policy at sampling; without a gradient."""
    ref_logprobs: Float[Tensor, "B T"]
    """The same under the reference; without a gradient."""
    advantages: Float[Tensor, "B T"]
    """Advantage of each response token, whitened if ppo.whiten_advantages says so; 0 on padding."""
    mask: Bool[Tensor, "B T"]
    """True on response tokens, the end token included."""
    config: ppo_config.PPOConfig
    """Section of the stage, with clip_range and the other keys."""


@dataclass(frozen=True, kw_only=True)
class PolicyLosses:
    """Loss of each token of a `PolicyBatch`; on padding any finite number."""

    losses: Float[Tensor, "*n"]
    """Loss of each token; lower is better."""
    clipped: Bool[Tensor, "*n"] | None = None
    """True where update/clip_fraction counts a token; None counts those whose probability ratio is
    outside the range of ppo.clip_range."""


PolicyLoss = Callable[[PolicyBatch], PolicyLosses]


def clipped_surrogate(batch: PolicyBatch, log_ratio: Float[Tensor, "B T"]) -> PolicyLosses:
    """Return `losses.policy_loss` of tokens with this log-ratio, nats."""
    config, zeros = batch.config, torch.zeros_like(log_ratio)
    low, high = losses.clip_bounds(config.clip_range, config.clip_range_high)
    ratio = losses.probability_ratio(log_ratio.detach(), zeros)
    return PolicyLosses(
        losses=losses.policy_loss(
            log_ratio,
            zeros,
            batch.advantages,
            clip_range=config.clip_range,
            clip_range_high=config.clip_range_high,
            dual_clip=config.dual_clip,
        ),
        clipped=(ratio < low) | (ratio > high),
    )


def sequence_log_ratio(batch: PolicyBatch) -> Float[Tensor, "B T"]:
    """Return the mean of a response's log-ratios at each of its tokens; 0 without a token."""
    log_ratio = torch.where(batch.mask, batch.logprobs - batch.old_logprobs, 0)
    tokens = batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = log_ratio.sum(dim=1, keepdim=True) / tokens
    return mean.expand_as(log_ratio)


def ppo(batch: PolicyBatch) -> PolicyLosses:
    """Return PPO's clipped surrogate of each token's own ratio, `losses.policy_loss`.

        r_t  = pi(y_t) / pi_old(y_t)
        loss = max(-A_t r_t, -A_t clip(r_t, 1 - clip_range, 1 + clip_range_high))

    Source: Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347
    """
    return clipped_surrogate(batch, batch.logprobs - batch.old_logprobs)


def gspo(batch: PolicyBatch) -> PolicyLosses:
    """Return the clipped surrogate of the ratio of the whole response; lower is better.

        s    = exp(mean_t log r_t)                       geometric mean of the ratios of a row
        loss = max(-A_t s, -A_t clip(s, 1 - clip_range, 1 + clip_range_high))

    The gradient of s reaches every token of the row. With one advantage a row, a response is
    clipped whole. clip_range, clip_range_high: towards 0 only the first step of an iteration
    learns; as large as ppo's, 0.2, nothing is clipped, since a mean hardly moves.
    Source: Zheng et al. 2025, eq. 5 and 7, https://arxiv.org/abs/2507.18071, with sequence_mean
    """
    return clipped_surrogate(batch, sequence_log_ratio(batch))


def gspo_token(batch: PolicyBatch) -> PolicyLosses:
    """Return `gspo` with a gradient of each token in its own log-probability alone.

        s_t  = sg(s) pi(y_t) / sg(pi(y_t))               s of gspo; sg has no gradient
        loss = max(-A_t s_t, -A_t clip(s_t, 1 - clip_range, 1 + clip_range_high))

    Its values are those of gspo, and its gradients too where a row has one advantage; it is the one
    for advantages that differ within a row, as with advantage=gae. Its knobs are those of gspo.
    Source: Zheng et al. 2025, eq. 13 and 14, https://arxiv.org/abs/2507.18071
    """
    shared = sequence_log_ratio(batch).detach()
    own = batch.logprobs - batch.logprobs.detach()
    log_ratio = shared + own
    return clipped_surrogate(batch, log_ratio)


def cispo(batch: PolicyBatch) -> PolicyLosses:
    """Return REINFORCE's loss weighed by the clipped ratio; lower is better.

        loss = -sg(clip(r_t, 1 - clip_range, 1 + clip_range_high)) A_t log pi(y_t)

    The weight has no gradient, so every token keeps one, clipped or not.
    clip_range: towards 0 a token that became unlikely counts whole; 1 has no lower bound.
    clip_range_high: towards 0 no token counts more than once; large is importance sampling.
    Source: MiniMax 2025, eq. 4 and 5, https://arxiv.org/abs/2506.13585, with token_mean
    """
    config, logprobs = batch.config, batch.logprobs
    low, high = losses.clip_bounds(config.clip_range, config.clip_range_high)
    weight = losses.probability_ratio(logprobs.detach(), batch.old_logprobs).clamp(low, high)
    return PolicyLosses(losses=-weight * batch.advantages * logprobs)


def sapo(batch: PolicyBatch) -> PolicyLosses:
    """Return the loss whose gradient fades with the distance of the ratio from 1; lower is better.

        loss = -A_t (4 / tau) sigmoid(tau (r_t - 1))     tau = sapo_tau_pos if A_t > 0, else _neg

    The gradient of a token is that of -A_t r_t, times 4 sigmoid (1 - sigmoid): 1 where r_t is 1.
    sapo_tau_pos, sapo_tau_neg: towards 0 no ratio is too large; a large one learns from tokens
    whose probability has not changed, and from no others. clip_range is not read.
    Source: Gao et al. 2025, https://arxiv.org/abs/2511.20347, with sequence_mean
    """
    config, advantages = batch.config, batch.advantages
    ratio = losses.probability_ratio(batch.logprobs, batch.old_logprobs)
    tau = torch.full_like(advantages, config.sapo_tau_neg)
    tau = tau.masked_fill(advantages > 0, config.sapo_tau_pos)
    return PolicyLosses(losses=-advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)))


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
}
"""Value of ppo.policy_loss -> loss."""


def example_batch(config: ppo_config.PPOConfig) -> PolicyBatch:
    """Return three responses of 4, 2 and 1 tokens; the policy of the first has not changed."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(4) < torch.tensor([[4], [2], [1]])
    old, moved, ref, advantages = torch.randn(4, 3, 4, generator=generator) * mask
    moved[0] = 0
    return PolicyBatch(
        logprobs=(-old.abs() - 0.1 * moved.abs()).requires_grad_(),
        old_logprobs=-old.abs(),
        ref_logprobs=-ref.abs(),
        advantages=advantages,
        mask=mask,
        config=config,
    )


def fault_in(
    found: Mapping[str, Tensor | None], mask: Bool[Tensor, "B T"], logprobs: Tensor | None = None
) -> str | None:
    """Return what is wrong with tensors of a made-up batch, as the end of "FUNCTION, ...", or None.

    They must have the mask's shape and be finite where it is True, as must the gradient of the
    first in `logprobs`, if given, which must not be 0 everywhere in the first row.
    """
    for name, tensor in found.items():
        if tensor is not None and tensor.shape != mask.shape:
            return f"whose {name} have shape {[*tensor.shape]} for a batch of {[*mask.shape]}"
        if tensor is not None and not tensor[mask].isfinite().all():
            return f"whose {name} are not finite"
    if logprobs is None:
        return None
    name, tensor = next(iter(found.items()))
    slope: Tensor | None = None
    if tensor is not None and tensor.requires_grad:
        total = torch.where(mask, tensor, 0).sum()
        (slope,) = torch.autograd.grad(total, logprobs, allow_unused=True)
    if slope is None or not slope[0].any():
        return f"whose {name} have no gradient in logprobs"
    if not slope[mask].isfinite().all():
        return f"whose {name} have a gradient that is not finite"
    return None


def fault_of_loss(loss: PolicyLoss, config: ppo_config.PPOConfig) -> str | None:
    """Return what is wrong with the losses of a made-up batch, as `fault_in`.

    They must also be those of each row alone.
    """
    batch = example_batch(config)
    found = loss(batch)
    if not isinstance(found, PolicyLosses):
        return f"which returned {type(found).__name__}"
    if fault := fault_in(vars(found), batch.mask, batch.logprobs):
        return fault
    parts = {f.name: getattr(batch, f.name)[:1] for f in fields(batch) if f.name != "config"}
    if not torch.allclose(loss(replace(batch, **parts)).losses, found.losses[:1]):
        return "whose losses of a row change with the other rows"
    return None


def fault_of_advantage(estimator: experience.Estimator, config: ppo_config.PPOConfig) -> str | None:
    """Return what is wrong with the advantages of a made-up batch, as `fault_in`.

    It has two groups of config.samples_per_prompt responses, one of which are all alike in their
    rewards. Returns are wanted for a critic, and no gradient.
    """
    rows = 2 * config.samples_per_prompt
    mask = example_batch(config).mask.repeat(rows, 1)[:rows]
    numbers = torch.randn(2, rows, 4, generator=torch.Generator().manual_seed(0)) * mask
    if config.samples_per_prompt > 1:
        numbers[0, : config.samples_per_prompt] = torch.tensor([1.0, 0, 0, 0])
    batch = experience.AdvantageBatch(
        rewards=numbers[0],
        values=numbers[1] * config.has_critic,
        mask=mask,
        component_scores=numbers[0].sum(dim=1, keepdim=True),
        weights=torch.ones(1),
        baseline=torch.zeros(rows),
        config=config,
    )
    found = estimator(batch)
    if not isinstance(found, experience.Advantages):
        return f"which returned {type(found).__name__}"
    if config.has_critic and found.returns is None:
        return "which returned no returns for the critic (ppo.vf_coef=0 has none)"
    if any(tensor is not None and tensor.requires_grad for tensor in vars(found).values()):
        return "whose numbers have a gradient"
    return fault_in(vars(found), mask)


def fault_of_kl(estimator: kl.Estimator, config: ppo_config.PPOConfig) -> str | None:
    """Return what is wrong with the estimates for a made-up batch, as `fault_in`.

    A gradient is wanted where ppo.kl_in=loss.
    """
    batch = example_batch(config)
    tokens = kl.TokenLogprobs(
        logprobs=batch.logprobs, old_logprobs=batch.old_logprobs, ref_logprobs=batch.ref_logprobs
    )
    found = estimator(tokens)
    if not isinstance(found, Tensor):
        return f"which returned {type(found).__name__}"
    wanted = batch.logprobs if config.kl_in == "loss" else None
    return fault_in({"estimates": found}, batch.mask, wanted)


FORMULAS: Mapping[str, tuple[dict[str, Any], Callable[..., str | None], str]] = {
    "policy_loss": (POLICY_LOSSES, fault_of_loss, f"PolicyLosses of a PolicyBatch, see {__name__}"),
    "advantage": (
        experience.ADVANTAGES,
        fault_of_advantage,
        f"Advantages of an AdvantageBatch, see {experience.__name__}",
    ),
    "kl_estimator": (kl.ESTIMATORS, fault_of_kl, f"a tensor of TokenLogprobs, see {kl.__name__}"),
}
"""Key of PPOConfig that a function of the user's may stand in -> table that it is entered in, its
trial, and what passes the trial."""
