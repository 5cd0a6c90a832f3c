"""Key-value cache of the trunk while sequences are sampled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

GAP = 384
"""Number of bytes between two heads up to which a processor prefetches across the gap."""
GROWTH = 64
"""Number of tokens by which the memory of a device other than the CPU grows, at the least: short
responses then need little of what the longest may take."""


def roomy_cache(config: PretrainedConfig, length: int) -> DynamicCache:
    """Return an empty cache for sequences of at most `length` tokens.

    Layers of full attention write into memory with room for more; other kinds of layers (sliding
    windows, linear attention) keep the library's own cache.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        RoomyLayer(length) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer; a new token is written after the others.

    The library's layer makes a new tensor of all tokens at every token. Narrow heads on a CPU do
    so here too, but only every few tokens: a processor that reads head by head prefetches the next
    head where the gap between them is small, and is then more than twice as fast. Under autocast
    keys may be in fp32, of which attention reads 16 bits: they are kept in the dtype of the values.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values; return all, [B, heads, tokens so far, head size]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.rooms = [x[:, :, :0] for x in (key_states.to(value_states.dtype), value_states)]
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self.rooms[0].shape[2]:
            moved = [self._room(room, len(room), end) for room in self.rooms]
            for new, room in zip(moved, self.rooms, strict=True):
                new[:, :, :start] = room[:, :, :start]
            self.rooms = moved
        for room, new in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, start:end] = new
        self._show(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the sequences `beam_idx`, in this order."""
        if not self.is_initialized:
            return
        end = self.get_seq_length()
        kept = [self._room(room, len(beam_idx), end) for room in self.rooms]
        for new, room in zip(kept, self.rooms, strict=True):
            torch.index_select(room[:, :, :end], 0, beam_idx, out=new[:, :, :end])
        self.rooms = kept
        self._show(end)

    def _room(self, like: Tensor, rows: int, end: int) -> Tensor:
        """Return memory for `rows` sequences of `end` tokens and some more."""
        _, heads, _, size = like.shape
        spare = GAP // (size * like.element_size())
        if like.device.type != "cpu":
            spare = max(GROWTH, end // 2)
        elif spare < 3:
            spare = self.length
        return like.new_empty(rows, heads, min(end + spare, self.length), size)

    def _show(self, end: int) -> None:
        self.keys, self.values = (room[:, :, :end] for room in self.rooms)
