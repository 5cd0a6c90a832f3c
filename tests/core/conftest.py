"""Right-padded batches of drawn shape, and what every test of the mathematics compares with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

NAN = float("nan")
T, F = True, False

drawn = settings(deadline=None, max_examples=25, derandomize=True, database=None)


@dataclass(frozen=True)
class Ragged:
    """Rows of different length: `mask` [B,T] is True on the first `lengths[i]` columns of row i."""

    lengths: tuple[int, ...]
    width: int
    seed: int

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.width) < torch.tensor(self.lengths)[:, None]

    def normal(self, stream: int) -> Tensor:
        """Draws from N(0, 1) in float64, the same for the same stream; NaN on padding."""
        generator = torch.Generator().manual_seed(self.seed * 31 + stream)
        shape = (len(self.lengths), self.width)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.masked_fill(~self.mask, NAN)

    def row_normal(self, stream: int) -> Tensor:
        """One draw from N(0, 1) for each row, float64."""
        generator = torch.Generator().manual_seed(self.seed * 31 + stream)
        return torch.randn(len(self.lengths), generator=generator, dtype=torch.float64)


@st.composite
def ragged(draw: st.DrawFn, max_rows: int = 5, max_width: int = 6) -> Ragged:
    width = draw(st.integers(1, max_width))
    lengths = draw(st.lists(st.integers(1, width), min_size=1, max_size=max_rows))
    return Ragged(tuple(lengths), width, draw(st.integers(0, 2**20)))


def pad(x: Tensor, columns: int, garbage: float) -> Tensor:
    """`x` [B,T] with `columns` more columns full of `garbage`."""
    return torch.cat([x, x.new_full((len(x), columns), garbage)], dim=1)


def close(found: Tensor, expected: Tensor, *, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
