"""A record of tensors with one row per sequence: how it is moved, selected, split and joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from lightning_rlhf.core.masking import upload


@dataclass(frozen=True, kw_only=True)
class Record:
    """A bundle of tensors that share their first dimension, the sequences."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the same record on `device`; Lightning calls this on every batch."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def select(self, rows: Int[Tensor, " M"] | slice) -> Self:
        """Return the sequences `rows` of every field; numbers on the CPU choose on any device."""
        if isinstance(rows, slice):
            return self._map(lambda tensor: tensor[rows])
        there = {rows.device: rows}

        def chosen(tensor: Tensor) -> Tensor:
            if tensor.device not in there:
                there[tensor.device] = upload(rows, tensor.device)
            return tensor[there[tensor.device]]

        return self._map(chosen)

    def repeat(self, times: int) -> Self:
        """Return every sequence `times` times in a row."""
        return self._map(lambda tensor: tensor.repeat_interleave(times, dim=0))

    def split(self, size: int) -> Iterator[Self]:
        """Yield consecutive records of `size` sequences; the last may be shorter."""
        for start in range(0, len(self), size):
            yield self.select(slice(start, start + size))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the records of all parts as one, in order; they have the same fields.

        Rows of fewer columns are padded on the right with 0 or False.
        """
        names = [f.name for f in fields(parts[0]) if getattr(parts[0], f.name) is not None]
        columns = {name: [getattr(part, name) for part in parts] for name in names}
        return replace(parts[0], **{name: _rows(tensors) for name, tensors in columns.items()})

    def detach(self) -> Self:
        """Return the same record without gradients."""
        return self._map(Tensor.detach)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: function(x) for n, x in present.items() if x is not None})


def _rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts, padded on the right to the widest."""
    if parts[0].dim() > 1:
        width = max(part.shape[1] for part in parts)
        parts = [F.pad(part, (0, width - part.shape[1])) for part in parts]
    return torch.cat([*parts])
