"""Which positions of padded rows are computed, and their places among all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_rlhf.core.products import ROWS, rounded_up
from lightning_rlhf.models.attention import signed

WORTH = 0.08  # share of padding from which packing saves more than its copies cost
MULTIPLE = 32  # numbers of positions are rounded up to it, or to ROWS where shapes are to be few
COLUMNS, MOST_ADDED = 16, 0.04
"""Attention on a CPU takes up to a third more time for a length that is no multiple; and the share
of columns that it costs less than."""


@dataclass(frozen=True)
class Packing:
    """Which of B rows of S positions are computed where each position is by itself.

    Letters: N tokens that something wanted depends on, M wanted ones, and a few others behind
    either.
    """

    rows: int
    """B."""
    columns: int
    """S."""
    real: Int[Tensor, " N"] | None
    """Places of the N among B x S; None: they are taken to be all."""
    wanted: Int[Tensor, " M"]
    """Places of the M among B x S."""
    wanted_real: Int[Tensor, " M"]
    """Places of the M among the N."""
    count: int
    """M."""
    again: Callable[[], AbstractContextManager[None]]
    """What a layer that is computed once more for its gradient is computed in."""
    _turns: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        wanted: Bool[Tensor, "B S"],
        again: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        few_shapes: bool = False,
    ) -> Packing:
        """Every row is needed from its first position up to its last wanted one.

        few_shapes: N and M are multiples of a larger number, where there are others enough to fill
        them up with.
        """
        rows, columns = wanted.shape
        multiple = ROWS if few_shapes else MULTIPLE
        real = wanted.flip(1).cummax(1).values.flip(1).flatten()
        last = _filled_up(wanted.flatten(), real, multiple)
        count = int(wanted.sum())
        if real.float().mean() > 1 - WORTH:
            return cls(rows, columns, None, last, last, count, again)
        number = real.cumsum(0) - 1
        places = _filled_up(real, ~real, multiple)
        return cls(rows, columns, places, last, number[last], count, again)

    def packed(self, x: Float[Tensor, "BS d"], *, last: bool = False) -> Float[Tensor, "N d"]:
        """Without padding; `last`: the M wanted ones, as the last layer computes them."""
        places = self.wanted if last else self.real
        return x if places is None else taken(x, places)

    def padded(self, x: Float[Tensor, "N d"], *, last: bool = False) -> Float[Tensor, "B S d"]:
        """The rows as a mixer of positions reads them, 0 where `packed` left something out."""
        places = self.wanted if last else self.real
        x = x if places is None else put(x, places, self.rows * self.columns)
        return x.view(self.rows, self.columns, x.shape[-1])

    def turns(
        self, cos: Float[Tensor, "#B S r"], sin: Float[Tensor, "#B S r"], *, last: bool = False
    ) -> tuple[Float[Tensor, "N 1 r"], Float[Tensor, "N 1 r"]]:
        """How `turned` rotates what `packed` leaves; laid out once, for all layers."""
        if last not in self._turns:
            self._turns[last] = tuple(  # type: ignore[assignment]
                self.packed(table.repeat(self.rows, 1), last=last)[:, None]
                for table in (cos[0], signed(sin[0]))
            )
        return self._turns[last]


def columns_to_add(columns: int, *, few_shapes: bool = False) -> int:
    """For a length that attention is fast on; 0 where they would cost more than they save.

    few_shapes: always.
    """
    more = rounded_up(columns, COLUMNS) - columns
    return more if few_shapes or more <= MOST_ADDED * columns else 0


def _filled_up(
    chosen: Bool[Tensor, " n"], others: Bool[Tensor, " n"], multiple: int
) -> Int[Tensor, " m"]:
    """Places of what is chosen; behind them, of as many others as round the number up."""
    places, more = (x.nonzero().squeeze(1) for x in (chosen, others & ~chosen))
    return torch.cat([places, more[: rounded_up(len(places), multiple) - len(places)]])


def taken(x: Float[Tensor, "n d"], places: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
    """The rows of x at these places, each at most once."""
    return _Taken.apply(x, places)  # type: ignore


def put(x: Float[Tensor, "m d"], places: Int[Tensor, " m"], count: int) -> Float[Tensor, "n d"]:
    """The rows of x at these of `count` places, 0 elsewhere."""
    return _Put.apply(x, places, count)  # type: ignore


def _put(x: Float[Tensor, "m d"], places: Int[Tensor, " m"], count: int) -> Float[Tensor, "n d"]:
    return x.new_zeros(count, x.shape[1]).index_copy_(0, places, x)


class _Taken(torch.autograd.Function):
    """`taken`; autograd's own gradient adds the rows up one by one."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "n d"], places: Int[Tensor, " m"]
    ) -> Float[Tensor, "m d"]:
        ctx.save_for_backward(places)
        ctx.count = len(x)
        return x.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "m d"]) -> tuple[Float[Tensor, "n d"], None]:
        (places,) = ctx.saved_tensors
        return _put(dy, places, ctx.count), None


class _Put(torch.autograd.Function):
    """`put`; autograd by itself would keep x."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "m d"], places: Int[Tensor, " m"], count: int
    ) -> Float[Tensor, "n d"]:
        ctx.save_for_backward(places)
        return _put(x, places, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "m d"], None, None]:
        (places,) = ctx.saved_tensors
        return dy.index_select(0, places), None, None
