"""From padded responses to the tokens that were generated."""

from __future__ import annotations

from jaxtyping import Bool, Int
from torch import Tensor


def real_tokens(tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> list[list[int]]:
    """The tokens of each row where the mask is True."""
    rows = zip(tokens.tolist(), mask.tolist(), strict=True)
    return [[t for t, real in zip(row, keep, strict=True) if real] for row, keep in rows]
