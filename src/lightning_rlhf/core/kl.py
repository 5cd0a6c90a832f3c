"""Estimators of the KL between two policies, that of best-of-n, and controllers of its coefficient.

Estimates of KL(p || q) from the log-probabilities of tokens drawn from p. Source for k1, k2, k3:
Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.ppo_config import PPOConfig


def k1(p_logprobs: Float[Tensor, "*n"], q_logprobs: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return `log p - log q`: unbiased, of high variance; single values may be negative.

    As a loss it has no effect: its gradient is that of log p, which is 0 on average.
    """
    return p_logprobs - q_logprobs


def k2(p_logprobs: Float[Tensor, "*n"], q_logprobs: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return `1/2 (log p - log q)^2`: biased, of low variance and never negative.

    As a loss on tokens drawn from p, its gradient is an unbiased estimate of that of KL(p || q).
    """
    return 0.5 * (p_logprobs - q_logprobs) ** 2


def k3(p_logprobs: Float[Tensor, "*n"], q_logprobs: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return `(r - 1) - log r` with `r = q / p`: unbiased, of lower variance and never negative.

    As a loss on tokens drawn from p, its gradient is an unbiased estimate of that of KL(q || p).
    """
    log_ratio = q_logprobs - p_logprobs
    return torch.expm1(log_ratio) - log_ratio


def absolute(
    p_logprobs: Float[Tensor, "*n"], q_logprobs: Float[Tensor, "*n"]
) -> Float[Tensor, "*n"]:
    """Return `|log p - log q|`: no estimate of the KL, but a penalty on any difference."""
    return (p_logprobs - q_logprobs).abs()


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Response tokens whose KL to the reference is estimated, of any shape: nats, each by itself.

    On padding, which is not read, all are 0.
    """

    logprobs: Float[Tensor, "*n"]
    """Log-probability of each token under the policy; with ppo.kl_in=loss it is the one that is
    trained, and the estimate is differentiated with respect to it."""
    old_logprobs: Float[Tensor, "*n"]
    """The same under the policy at sampling; with ppo.kl_in=reward it is `logprobs`."""
    ref_logprobs: Float[Tensor, "*n"]
    """The same under the reference; without a gradient."""
    vocabulary_kl: Float[Tensor, "*n"] | None = None
    """KL over the whole vocabulary; None unless ppo.kl_estimator=full."""


Estimator = Callable[[TokenLogprobs], Float[Tensor, "*n"]]


def of_pair(formula: Callable[[Tensor, Tensor], Tensor]) -> Estimator:
    """Return the estimator by a formula of the policy's and the reference's log-probabilities."""
    return lambda tokens: formula(tokens.logprobs, tokens.ref_logprobs)


def k3_plus(tokens: TokenLogprobs) -> Float[Tensor, "*n"]:
    """Return the value of k3 with the gradient of k2, which on tokens of the policy is unbiased.

        k2 + sg(k3 - k2)                             sg has no gradient

    Source: Liu et al. 2025, https://arxiv.org/abs/2510.01555 (k2's gradient), as k3+ in verl
    """
    k2_losses = k2(tokens.logprobs, tokens.ref_logprobs)
    return k2_losses + (k3(tokens.logprobs, tokens.ref_logprobs) - k2_losses).detach()


def k3_weighted(tokens: TokenLogprobs) -> Float[Tensor, "*n"]:
    """Return k3 times the probability ratio, unbiased in value and gradient after updates too.

        w k3,   w = exp(log p - log p_old)           with a gradient of its own

    The mean over tokens of p_old is sum_v p_v k3_v = KL(p || q), whatever p is, and so its gradient
    is that of the KL. Its cost is the variance of w; in the reward, where w is 1, it is k3.
    Source: DeepSeek-AI 2025, eq. 7, https://arxiv.org/abs/2512.02556
    """
    weight = torch.exp(tokens.logprobs - tokens.old_logprobs)
    return weight * k3(tokens.logprobs, tokens.ref_logprobs)


def over_vocabulary(tokens: TokenLogprobs) -> Float[Tensor, "*n"]:
    """Return the KL over the whole vocabulary, `logprobs.vocabulary_kl`, without sampling."""
    assert tokens.vocabulary_kl is not None
    return tokens.vocabulary_kl


ESTIMATORS: dict[str, Estimator] = {
    "k1": of_pair(k1),
    "k2": of_pair(k2),
    "k3": of_pair(k3),
    "k3+": k3_plus,
    "k3_weighted": k3_weighted,
    "abs": of_pair(absolute),
    "mse": of_pair(k2),
    "full": over_vocabulary,
}
"""Value of ppo.kl_estimator -> estimator; "mse" is TRL's name of k2. A run adds the one of the
user's that it names."""


def token_kl(
    config: PPOConfig,
    logprobs: Float[Tensor, "*n"],
    old_logprobs: Float[Tensor, "*n"],
    ref_logprobs: Float[Tensor, "*n"],
    vocabulary_kl: Float[Tensor, "*n"] | None,
) -> Float[Tensor, "*n"]:
    """Return the KL to the reference that ppo.kl_coef multiplies, nats a token."""
    tokens = TokenLogprobs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        vocabulary_kl=vocabulary_kl,
    )
    return ESTIMATORS[config.kl_estimator](tokens)


def adapted_coef(
    kl_coef: float, kl: float, *, target: float, horizon: float, episodes: int
) -> float:
    """Return the coefficient after a batch: larger where the KL is above its target, smaller below.

        e      = clip((kl - target) / target, -0.2, 0.2)
        coef' = coef * (1 + e * episodes / horizon)

    kl, target: KL in nats a response. horizon: number of episodes over which an error of e changes
    the coefficient by a relative amount of about e.
    Source: Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593
    Departs: K_beta = 0.1 a batch there; horizon makes it independent of the batch's size, as in
    the code of that paper (episodes / horizon in place of K_beta).
    """
    error = min(max((kl - target) / target, -0.2), 0.2)
    return kl_coef * (1 + error * episodes / horizon)


def linear_coef(start: float, end: float, iteration: int, iterations: int) -> float:
    """Return the coefficient of an iteration, on a line from the first iteration to the last.

        start + (end - start) * min(1, iteration / (iterations - 1))

    iteration: number of the iteration, from 0; a run of one has `start`.
    """
    done = min(1.0, iteration / max(1, iterations - 1))
    return start + (end - start) * done


def ent_coef(config: PPOConfig, iteration: int) -> float:
    """Return the entropy coefficient of an iteration: from ent_coef on a line to ent_coef_end."""
    start, end = config.ent_coef, config.ent_coef_end
    return start if end is None else linear_coef(start, end, iteration, config.iterations)


def next_kl_coef(
    kl_coef: float, kl: Float[Tensor, "B T"], config: PPOConfig, *, iteration: int
) -> float:
    """Return the KL coefficient of the next iteration by the controller ppo.kl_control.

        fixed      coef
        linear     kl_coef in the first iteration to kl_coef_end in the last
        adaptive   `adapted_coef`

    kl_coef, iteration: coefficient and number of the iteration that ends here, counted from 0.
    kl: KL to the reference at each token of its responses, nats; 0 on padding.
    """
    match config.kl_control:
        case "fixed":
            return kl_coef
        case "linear":
            ends = config.kl_coef, config.kl_coef_end
            return linear_coef(*ends, iteration + 1, config.iterations)
        case "adaptive":
            mean, target, horizon = kl.sum(dim=1).mean().item(), config.kl_target, config.kl_horizon
            return adapted_coef(kl_coef, mean, target=target, horizon=horizon, episodes=len(kl))


def best_of_kl_bound(n: int) -> float:
    """Return the largest KL of best-of-n to the policy that it samples from, nats.

        KL <= log n - (n - 1) / n, equal where no two responses have the same score

    Source: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, appendix G.3
    """
    return math.log(n) - (n - 1) / n


def best_of_kl(scores: Sequence[float], n: int) -> float:
    """Return an estimate of the KL of best-of-n from scores of the policy's responses, nats.

        KL = sum_s w_s log(w_s / p_s), with w_s = P(x <= s)^n - P(x < s)^n

    over the different scores s, with p_s their shares among `scores`. It counts responses of one
    score as one, so that it is at most the bound, and below it by less the more scores there are.
    """
    shares, total, below = Counter(scores), len(scores), 0
    kl = 0.0
    for score in sorted(shares):
        count = shares[score]
        weight = ((below + count) / total) ** n - (below / total) ** n
        if weight > 0:  # below the smallest float where n is large
            kl += weight * math.log(weight * total / count)
        below += count
    return kl
