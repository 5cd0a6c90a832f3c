"""Selection of the positions of padded rows to compute, and gathering and scattering of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_rlhf.core.masking import upload
from lightning_rlhf.kernels.attention import signed_sin
from lightning_rlhf.kernels.products import ROWS, rounded_up

WORTH = 0.08  # share of padding from which packing saves more than its copies cost
MULTIPLE = 32  # numbers of positions are rounded up to it, or to ROWS with few_shapes
COLUMNS, MOST_ADDED = 16, 0.04
"""Multiple to which a row's length is rounded up, since attention on a CPU takes up to a third more
time for other lengths; and the largest share of added columns at which that saves time."""


@dataclass(frozen=True)
class Packing:
    """Positions of B padded rows of length S that token-wise layers compute.

    Letters: N positions that a wanted one depends on, M wanted ones, each with a few others that
    round the number up.
    """

    rows: int
    """Number of rows, B."""
    columns: int
    """Length of the padded rows, S."""
    real: Int[Tensor, " N"] | None
    """Indices of the N among B x S; None where all are computed."""
    wanted: Int[Tensor, " M"]
    """Indices of the M among B x S."""
    wanted_real: Int[Tensor, " M"]
    """Indices of the M among the N."""
    count: int
    """Number of wanted positions without those that round it up."""
    _rotary: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        wanted: Bool[Tensor, "B S"],
        *,
        few_shapes: bool = False,
    ) -> Packing:
        """Return the packing of each row from its first position up to its last wanted one.

        few_shapes: whether N and M are multiples of a larger number, where there are enough other
            positions to fill them up.
        """
        rows, columns = wanted.shape
        multiple = ROWS if few_shapes else MULTIPLE
        real = wanted.flip(1).cummax(1).values.flip(1).flatten()
        count, every = int(wanted.sum()), torch.ones_like(real)
        if real.float().mean() > 1 - WORTH:
            last = _filled_up(wanted.flatten(), every, multiple)
            return cls(rows, columns, None, last, last, count)
        indices = _filled_up(real, every, multiple)
        number = torch.full(real.shape, -1, device=real.device)
        number[indices] = torch.arange(len(indices), device=real.device)
        last = _filled_up(wanted.flatten(), number >= 0, multiple)
        return cls(rows, columns, indices, last, number[last], count)

    def to(self, device: torch.device) -> Packing:
        """Return the packing with its indices on `device`, without waiting for that."""
        return replace(
            self,
            real=None if self.real is None else upload(self.real, device),
            wanted=upload(self.wanted, device),
            wanted_real=upload(self.wanted_real, device),
        )

    def pack(self, x: Float[Tensor, "BS d"], *, last: bool = False) -> Float[Tensor, "N d"]:
        """Gather the N positions; `last`: the M wanted ones, as the last layer computes them."""
        indices = self.wanted if last else self.real
        return x if indices is None else gather_rows(x, indices)

    def pad(self, x: Float[Tensor, "N d"], *, last: bool = False) -> Float[Tensor, "B S d"]:
        """Scatter what `pack` gathered into padded rows, 0 elsewhere."""
        indices = self.wanted if last else self.real
        x = x if indices is None else scatter_rows(x, indices, self.rows * self.columns)
        return x.view(self.rows, self.columns, x.shape[-1])

    def rotary_tables(
        self, cos: Float[Tensor, "#B S r"], sin: Float[Tensor, "#B S r"], *, last: bool = False
    ) -> tuple[Float[Tensor, "N 1 r"], Float[Tensor, "N 1 r"]]:
        """Return cos and signed sin of the positions that `pack` keeps; made once."""
        if last not in self._rotary:
            self._rotary[last] = tuple(  # type: ignore[assignment]
                self.pack(table.repeat(self.rows, 1), last=last)[:, None]
                for table in (cos[0], signed_sin(sin[0]))
            )
        return self._rotary[last]


def columns_to_add(columns: int, *, few_shapes: bool = False) -> int:
    """Return the number of columns to add to rows for a length at which attention is fast.

    It is 0 where they would cost more than they save.
    few_shapes: whether to extend to a multiple of COLUMNS always.
    """
    more = rounded_up(columns, COLUMNS) - columns
    return more if few_shapes or more <= MOST_ADDED * columns else 0


def _filled_up(
    chosen: Bool[Tensor, " n"], others: Bool[Tensor, " n"], multiple: int
) -> Int[Tensor, " m"]:
    """Return the indices of the chosen positions, then of others that round the number up."""
    indices, more = (x.nonzero().squeeze(1) for x in (chosen, others & ~chosen))
    return torch.cat([indices, more[: rounded_up(len(indices), multiple) - len(indices)]])


def gather_rows(x: Float[Tensor, "n d"], indices: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
    """Return the rows of x at these indices, each at most once."""
    return _Gather.apply(x, indices)  # type: ignore


def scatter_rows(
    x: Float[Tensor, "m d"], indices: Int[Tensor, " m"], count: int
) -> Float[Tensor, "n d"]:
    """Return `count` rows: those of x at these indices, 0 elsewhere."""
    return _Scatter.apply(x, indices, count)  # type: ignore


def _scattered(
    x: Float[Tensor, "m d"], indices: Int[Tensor, " m"], count: int
) -> Float[Tensor, "n d"]:
    return x.new_zeros(count, x.shape[1]).index_copy_(0, indices, x)


class _Gather(torch.autograd.Function):
    """Function of `gather_rows`; autograd's own gradient adds the rows one by one."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "n d"], indices: Int[Tensor, " m"]
    ) -> Float[Tensor, "m d"]:
        ctx.save_for_backward(indices)
        ctx.count = len(x)
        return x.index_select(0, indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "m d"]) -> tuple[Float[Tensor, "n d"], None]:
        (indices,) = ctx.saved_tensors
        return _scattered(dy, indices, ctx.count), None


class _Scatter(torch.autograd.Function):
    """Function of `scatter_rows`; autograd by itself would keep x."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "m d"], indices: Int[Tensor, " m"], count: int
    ) -> Float[Tensor, "n d"]:
        ctx.save_for_backward(indices)
        return _scattered(x, indices, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "m d"], None, None]:
        (indices,) = ctx.saved_tensors
        return dy.index_select(0, indices), None, None
