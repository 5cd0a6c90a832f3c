"""Sums, means and whitening over real tokens only."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def masked_sum(x: Float[Tensor, ...], mask: Bool[Tensor, ...]) -> Float[Tensor, ""]:
    """Sum of `x` where `mask` is True. Whatever stands elsewhere, NaN included, has no effect."""
    return torch.where(mask, x, 0).sum()


def masked_mean(x: Float[Tensor, ...], mask: Bool[Tensor, ...]) -> Float[Tensor, ""]:
    """Mean of `x` over the True elements of `mask`; NaN if there are none."""
    return masked_sum(x, mask) / mask.sum()


def masked_whiten(
    x: Float[Tensor, ...], mask: Bool[Tensor, ...], eps: float = 1e-8
) -> Float[Tensor, ...]:
    """Shift and scale the real elements of `x` to mean 0 and variance 1.

        (x - mean) / sqrt(var + eps),  var = mean((x - mean)^2)

    The variance is the population's (divided by the count, not by the count minus one), so that
    appending a copy of the batch changes nothing. Returns 0 on padding.
    """
    x = torch.where(mask, x, 0)
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + eps), 0)
