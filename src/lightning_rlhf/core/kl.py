"""Monte-Carlo estimates of KL(p || q) from the log-probabilities of tokens drawn from p.

Source: Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def k1(p_logprobs: Float[Tensor, ...], q_logprobs: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """Unbiased and of high variance: `log p - log q`. Single values may be negative."""
    return p_logprobs - q_logprobs


def k3(p_logprobs: Float[Tensor, ...], q_logprobs: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """Unbiased, of lower variance and never negative: `(r - 1) - log r` with `r = q / p`."""
    log_ratio = q_logprobs - p_logprobs
    return torch.expm1(log_ratio) - log_ratio
