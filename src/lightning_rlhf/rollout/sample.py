"""Sampling of tokens from logits."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


def sample(
    logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Draw tokens by inverse-CDF sampling: the first with cumulative probability above `uniform`.

    This has two levels: the vocabulary is summed in about sqrt(V) blocks, and only the block that
    contains the number is summed token by token. `uniform` in [0, 1) is scaled down slightly, so
    that rounding of the sums can never select a token of probability 0.

    logits: fp32, at temperature 1.
    Returns: the tokens, and their log-probabilities in nats; NaN for a row without a distribution.
    """
    size = logits.shape[1]
    block = math.isqrt(size - 1) + 1
    probability = torch.softmax(logits, -1)
    whole = size // block
    masses = probability[:, : whole * block].unflatten(1, (whole, block)).sum(-1)
    masses = torch.cat([masses, probability[:, whole * block :].sum(-1, keepdim=True)], dim=1)
    ends = cumulative(masses)
    target = uniform[:, None] * (1 - 1e-6) * ends[:, -1:]
    chosen = torch.searchsorted(ends, target, right=True).clamp(max=whole)
    before = F.pad(ends, (1, 0)).gather(1, chosen)
    places = chosen * block + torch.arange(block, device=logits.device)
    inside = cumulative(probability.gather(1, places.clamp(max=size - 1)))
    rest = (target - before).clamp(min=0).minimum(inside[:, -1:] * (1 - 1e-6))
    token = chosen * block + torch.searchsorted(inside, rest, right=True)
    token = token.clamp(max=size - 1)
    # The sum of blocks is nearer to 1 than the sum by which softmax divided.
    logprob = (probability.gather(1, token) / masses.sum(-1, keepdim=True)).log()
    return token.squeeze(1), logprob.squeeze(1)


def cumulative(mass: Float[Tensor, "B n"]) -> Float[Tensor, "B n"]:
    """Return the cumulative sum, which is constant where there is no mass, and never falls.

    A GPU's cumulative sum may fall by a rounding, and may rise where there is no mass.
    """
    return torch.where(mass > 0, mass.cumsum(-1), 0).cummax(-1).values
