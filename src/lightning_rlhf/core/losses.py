"""Losses per token or per pair, unreduced, and the terms of PPO's loss. Pure functions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from lightning_rlhf.core import errors, kl, masking, ppo_config, records
from lightning_rlhf.core.config import DPOConfig, LossType


def bradley_terry_loss(
    chosen: Float[Tensor, "*B"],
    rejected: Float[Tensor, "*B"],
    *,
    margin: Float[Tensor, "*#B"] | float = 0.0,
    label_smoothing: float = 0.0,
) -> Float[Tensor, "*B"]:
    """Return the negative log-likelihood that the chosen response wins; lower is better.

        d = r_chosen - r_rejected - margin
        -(1 - label_smoothing) log sigmoid(d) - label_smoothing log sigmoid(-d)

    It is log 2 at a tie. A margin above 0 requires a difference larger by that amount.
    label_smoothing is the assumed share of wrong labels: 0 trusts all labels, 0.5 none.
    Source: Ouyang et al. 2022, eq. 1, https://arxiv.org/abs/2203.02155; the margin, Touvron et al.
    2023, eq. 2, https://arxiv.org/abs/2307.09288; the smoothing, Mitchell 2023,
    https://ericmitchell.ai/cdpo.pdf
    """
    difference = chosen - rejected - margin
    right, wrong = F.logsigmoid(difference), F.logsigmoid(-difference)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def sigmoid_loss(
    chosen: Float[Tensor, "*B"], rejected: Float[Tensor, "*B"], config: DPOConfig
) -> Float[Tensor, "*B"]:
    """Return the loss of a classifier of pairs; lower is better.

        -log sigmoid(beta (chosen - rejected))

    beta towards 0 lets the policy go far, a large one keeps it near the reference. With cpo there
    is none: a large beta then makes a smaller difference of log-probabilities suffice.
    Source: Rafailov et al. 2023, eq. 7, https://arxiv.org/abs/2305.18290; without a reference, Xu
    et al. 2024, section 3.2, https://arxiv.org/abs/2401.08417
    """
    difference = chosen - rejected
    return -F.logsigmoid(config.beta * difference)


def ipo_loss(
    chosen: Float[Tensor, "*B"], rejected: Float[Tensor, "*B"], config: DPOConfig
) -> Float[Tensor, "*B"]:
    """Return the squared distance of a pair's difference from its target; lower is better.

        (chosen - rejected - 1 / (2 beta))^2

    beta towards 0 moves the target far away, a large one to 0, where the policy is the reference.
    Source: Azar et al. 2023, eq. 17, https://arxiv.org/abs/2310.12036
    Departs: eq. 17 has the sum over tokens; with the mean, as in TRL, long and short responses have
    the same target.
    """
    difference = chosen - rejected
    return (difference - 1 / (2 * config.beta)) ** 2


def simpo_loss(
    chosen: Float[Tensor, "*B"], rejected: Float[Tensor, "*B"], config: DPOConfig
) -> Float[Tensor, "*B"]:
    """Return the loss of a classifier of pairs with a margin; lower is better.

        -log sigmoid(beta (chosen - rejected) - gamma)

    gamma (simpo_gamma) 0 asks for no margin; a large one goes on pushing pairs apart that are
    ranked right. With beta towards 0 no pair counts, with a large one a small difference suffices.
    Source: Meng et al. 2024, eq. 6, https://arxiv.org/abs/2405.14734
    """
    difference = chosen - rejected
    return -F.logsigmoid(config.beta * difference - config.simpo_gamma)


def orpo_loss(
    chosen: Float[Tensor, "*B"], rejected: Float[Tensor, "*B"], config: DPOConfig
) -> Float[Tensor, "*B"]:
    """Return the loss of the ratio of the odds of two responses; lower is better.

        -beta log sigmoid(log odds(chosen) - log odds(rejected)),   odds = p / (1 - p)

    p is the geometric mean of the probabilities of a response's tokens. The loss of the paper also
    has the one of SFT, with sft_coef=1. beta 0 is SFT, a large one forgets it.
    Source: Hong et al. 2024, eq. 6 and 7, https://arxiv.org/abs/2403.07691
    Departs: a mean log-probability counts as at most -1e-6, so that the odds stay finite.
    """
    odds = [
        logprob - torch.log(-torch.expm1(logprob))
        for logprob in (chosen.clamp(max=-1e-6), rejected.clamp(max=-1e-6))
    ]
    return -config.beta * F.logsigmoid(odds[0] - odds[1])


PairLoss = Callable[[Float[Tensor, "*B"], Float[Tensor, "*B"], DPOConfig], Float[Tensor, "*B"]]
PAIR_LOSSES: Mapping[LossType, PairLoss] = {
    "sigmoid": sigmoid_loss,
    "sigmoid_norm": sigmoid_loss,
    "ipo": ipo_loss,
    "orpo": orpo_loss,
    "simpo": simpo_loss,
    "cpo": sigmoid_loss,
}
"""Name -> loss of a chosen and a rejected response: of their log-ratios to the reference, or of
their log-probabilities (`config.REFERENCE_FREE`); sums over tokens (`config.SUMMED`) or means."""


def preference_loss(
    chosen: Float[Tensor, "*B"], rejected: Float[Tensor, "*B"], config: DPOConfig
) -> Float[Tensor, "*B"]:
    """Return the loss of direct preference optimization for pairs; lower is better.

        (1 - label_smoothing) l(chosen, rejected) + label_smoothing l(rejected, chosen)

    l: the one of `PAIR_LOSSES` that loss_type names.
    label_smoothing is the assumed share of wrong labels: 0 trusts all labels, 0.5 none.
    Source: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf
    """
    loss, smoothing = PAIR_LOSSES[config.loss_type], config.label_smoothing
    right, wrong = loss(chosen, rejected, config), loss(rejected, chosen, config)
    return (1 - smoothing) * right + smoothing * wrong


def kto_loss(
    ratios: Float[Tensor, "*B"],
    labels: Bool[Tensor, "*B"],
    kl: Float[Tensor, "*#B"],
    config: DPOConfig,
) -> Float[Tensor, "*B"]:
    """Return the loss of single responses with a label each; lower is better.

        desirable_weight   (1 - sigmoid(beta (ratio - kl)))      where the label is true
        undesirable_weight (1 - sigmoid(beta (kl - ratio)))      where it is false

    A ratio is log pi(y | x) - log pi_ref(y | x), summed over tokens; kl, without a gradient, is
    what ratios are compared with. A weight of 0 leaves out the responses with that label; the paper
    wants weight times number of both to be of like size. beta towards 0 lets the policy go far, and
    with a large one only responses count whose ratio is near the kl.
    Source: Ethayarajh et al. 2024, eq. 8, https://arxiv.org/abs/2402.01306
    """
    loss = 1 - torch.sigmoid(config.beta * torch.where(labels, ratios - kl, kl - ratios))
    return torch.where(labels, config.desirable_weight * loss, config.undesirable_weight * loss)


def centering_loss(
    chosen: Float[Tensor, "*B"], rejected: Float[Tensor, "*B"]
) -> Float[Tensor, "*B"]:
    """Return the squared sum of a pair's rewards; lower is better.

        (r_chosen + r_rejected)^2

    Bradley-Terry leaves an offset undetermined for every prompt, which is noise for PPO. This loss
    determines it.
    Source: Eisenstein et al. 2023, section 2, https://arxiv.org/abs/2312.09244
    """
    return (chosen + rejected) ** 2


def clip_bounds(clip_range: float, clip_range_high: float | None) -> tuple[float, float]:
    """Return the lowest and the highest ratio that PPO's policy loss does not clip.

    clip_range_high: None is clip_range; a larger one lets the probability of rare good tokens grow
        faster.
    """
    return 1 - clip_range, 1 + (clip_range if clip_range_high is None else clip_range_high)


LARGEST_LOG_RATIO = 80.0
"""Log-ratio from which on a ratio grows no more, nats. float32 holds e^80 times an advantage of
thousands; beyond e^88.7, its infinity, the gradient of a clipped token would be NaN."""


def probability_ratio(
    logprobs: Float[Tensor, "*n"], old_logprobs: Float[Tensor, "*n"]
) -> Float[Tensor, "*n"]:
    """Return exp(min(logprobs - old_logprobs, LARGEST_LOG_RATIO)); the bound has no gradient."""
    log_ratio = logprobs - old_logprobs
    return torch.exp(log_ratio.clamp(max=LARGEST_LOG_RATIO))


def policy_loss(
    logprobs: Float[Tensor, "*n"],
    old_logprobs: Float[Tensor, "*n"],
    advantages: Float[Tensor, "*n"],
    *,
    clip_range: float,
    clip_range_high: float | None,
    dual_clip: float | None,
) -> Float[Tensor, "*n"]:
    """Return PPO's clipped surrogate, negated: lower is better.

        ratio = exp(logprobs - old_logprobs)               `probability_ratio`
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_range, 1 + clip_range_high))
        loss  = min(loss, -A * dual_clip)      where A < 0 and dual_clip is given

    A token whose ratio is already outside the range, in the direction that its advantage favours,
    has no gradient.
    clip_range, clip_range_high: as for `clip_bounds`.
    dual_clip: factor of -A that bounds the loss of a bad token that became likely; None does not.
    Source: Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347; high: Yu et al. 2025,
    section 3.1, https://arxiv.org/abs/2503.14476; dual: Ye et al. 2020, eq. 3,
    https://arxiv.org/abs/1912.09729
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    low, high = clip_bounds(clip_range, clip_range_high)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def importance_factors(
    batch: records.Experience, config: ppo_config.PPOConfig, stage: str
) -> Float[Tensor, "B T"] | None:
    """Return the factors of the tokens' policy losses where another program sampled them.

        w_t = min(p_trainer / p_sampler, importance_cap)     both of the policy at sampling
        w_t = 0 in a response that `kept_responses` leaves out

    1 where both agree. A cap of 1 only makes tokens count less that the sampler likes too much; a
    large one is importance sampling, without bias and with a large variance; towards 0 nothing is
    learned; None weighs all by 1. They have no gradient, and are 1 on padding.

    Returns: None where neither key asks for factors.
    Raises: ConfigError where the sampler returned no log-probabilities; stage: section to name.
    Source: Yao et al. 2025, truncated importance sampling, https://fengyao.notion.site/off-policy-rl
    """
    keys = {"importance_cap": config.importance_cap, "importance_mask": config.importance_mask}
    if all(value is None for value in keys.values()):
        return None
    if (sampled := batch.sampler_logprobs) is None:
        allowed = "null for a sampler that is exact, or returns no log-probabilities"
        key = next(key for key, value in keys.items() if value is not None)
        raise errors.ConfigError(errors.refusal(f"{stage}.{key}", keys[key], allowed))
    factors = torch.ones_like(sampled)
    if config.importance_cap is not None:
        log_ratio = torch.where(batch.response_mask, batch.old_logprobs - sampled, 0)
        factors = torch.exp(log_ratio).clamp(max=config.importance_cap)
    if config.importance_mask is not None:
        is_kept = kept_responses(
            batch.old_logprobs - sampled, batch.response_mask, config.importance_mask
        )
        factors = torch.where(is_kept[:, None], factors, 0)
    return factors


def kept_responses(
    log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], bounds: tuple[float, float]
) -> Bool[Tensor, " B"]:
    """Return which responses count: those that trainer and sampler find about as likely a token.

        low <= exp(mean_t (log p_trainer - log p_sampler)) <= high      geometric mean of the ratios

    log_ratio: the difference of each token, nats.
    bounds: (low, high) of ppo.importance_mask. (0, large) keeps all responses; (1, 1) those alone
    that both find exactly as likely. The others stay in the denominators of the loss.
    Source: Liu et al. 2025, https://yingru.notion.site/271211a558b7808d8b12d403fd15edda
    Departs: the ratio there is the product over the tokens, which grows with their number; the mean
    is that of NeMo-RL and OpenRLHF.
    """
    tokens = mask.sum(dim=1).clamp(min=1)
    ratio = torch.exp(torch.where(mask, log_ratio, 0).sum(dim=1) / tokens)
    return (ratio >= bounds[0]) & (ratio <= bounds[1])


def value_loss(
    values: Float[Tensor, "*n"],
    old_values: Float[Tensor, "*n"],
    returns: Float[Tensor, "*n"],
    *,
    clip_range_vf: float | None,
) -> Float[Tensor, "*n"]:
    """Return the squared error of the critic, with its change from the old value clipped.

        v_clip = old + clip(V - old, -clip_range_vf, clip_range_vf)
        0.5 * max((V - R)^2, (v_clip - R)^2)

    clip_range_vf: None is the plain 0.5 * (V - R)^2.
    Source: Huang et al. 2022, detail 9, https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
    """
    error = (values - returns) ** 2
    if clip_range_vf is None:
        return 0.5 * error
    clipped = old_values + (values - old_values).clamp(-clip_range_vf, clip_range_vf)
    return 0.5 * torch.maximum(error, (clipped - returns) ** 2)


def token_weights(
    mask: Bool[Tensor, "B T"], reduction: ppo_config.Reduction, *, max_response_tokens: int
) -> Float[Tensor, "B T"]:
    """Return the weight of each token's loss in the minimised sum; 0 on padding.

        token_mean     1 / (real tokens of all B)         every token counts the same
        sequence_mean  1 / (B * tokens of its response)   every response counts the same
        constant       1 / (B * max_response_tokens)      as token_mean; long batches count more

    Call it on a whole minibatch: the sums of its micro-batches then add up to the same loss.
    Source: Shao et al. 2024, eq. 3 (sequence_mean), https://arxiv.org/abs/2402.03300; Liu et al.
    2025, section 3 (constant), https://arxiv.org/abs/2503.20783
    """
    real = mask.float()
    match reduction:
        case "token_mean":
            return real / real.sum()
        case "sequence_mean":
            return real / (len(mask) * real.sum(dim=1, keepdim=True).clamp(min=1))
        case "constant":
            return real / (len(mask) * max_response_tokens)


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
    batch: records.Experience,
    weights: Float[Tensor, "B T"],
    tokens: Int[Tensor, ""],
    config: ppo_config.PPOConfig,
    *,
    kl_coef: float,
    ent_coef: float,
    policy: PolicyOutputs | None,
    policy_losses: Float[Tensor, " N"] | None,
    values: Float[Tensor, " N"] | None,
    clipped: Bool[Tensor, " N"] | None = None,
) -> records.PPOTerms:
    """Return the loss of one micro-batch and its statistics, as shares of the minibatch's.

        loss = sum_t w_t (policy_loss_t + kl_coef kl_t - ent_coef entropy_t + vf_coef value_loss_t)

    The losses weigh each token by w; entropy, KL, ratio and the clipped shares are means over the
    tokens of the minibatch. Without policy or values their terms are 0; ptx_loss is 0 here.

    Args:
        batch, weights: the micro-batch, and the same slice of `token_weights` of the minibatch.
        tokens: real response tokens of the whole minibatch.
        kl_coef, ent_coef: coefficients of the iteration; kl_coef is used where ppo.kl_in=loss.
        policy: predictions of the policy; None where the critic is updated by itself.
        policy_losses: `policy_loss` of each real response token, or another loss; None likewise.
        values: V(s_t) of the critic at each of them; None where the policy learns by itself.
        clipped: tokens that clip_fraction counts; None for those outside the clip range.
    """
    pick = masking.picker(records.known_mask(batch))
    weight = pick(weights)
    loss = zeros = torch.zeros_like(weight)
    kl_losses = value_losses = zeros
    entropy = approx_kl = ratio = policy_clipped = value_clipped = zeros
    if policy is None or policy_losses is None:
        policy_losses = zeros
    else:
        loss, old_logprobs = policy_losses, pick(batch.old_logprobs)
        if config.kl_in == "loss":
            read = policy.logprobs, old_logprobs, pick(batch.ref_logprobs)
            kl_losses = kl.token_kl(config, *read, policy.vocabulary_kl)
            loss = loss + kl_coef * kl_losses
        entropy = policy.entropy
        if ent_coef > 0:
            loss = loss - ent_coef * entropy
        with torch.no_grad():
            approx_kl = kl.k3(old_logprobs, policy.logprobs)
            ratio = torch.exp(policy.logprobs - old_logprobs)
            low, high = clip_bounds(config.clip_range, config.clip_range_high)
            outside = (ratio < low) | (ratio > high)
            policy_clipped = (outside if clipped is None else clipped).float()
    if values is not None:
        old_values, bound = pick(batch.old_values), config.clip_range_vf
        value_losses = value_loss(values, old_values, pick(batch.returns), clip_range_vf=bound)
        loss = loss + config.vf_coef * value_losses
        limit = math.inf if bound is None else bound
        value_clipped = ((values - old_values).abs() > limit).float()
    return records.PPOTerms(
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


def sum_terms(terms: Sequence[records.PPOTerms]) -> records.PPOTerms:
    """Return the terms of all micro-batches together: sums of shares, the largest of ratio_max."""
    names = [field.name for field in fields(records.PPOTerms)]
    columns = {name: torch.stack([getattr(one, name) for one in terms]) for name in names}
    whole = {name: shares.sum() for name, shares in columns.items()}
    return records.PPOTerms(**whole | {"ratio_max": columns["ratio_max"].max()})
