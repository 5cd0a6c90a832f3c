"""What the trunk remembers of a sequence while it grows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer


def roomy_cache(config: PretrainedConfig, length: int) -> DynamicCache:
    """An empty cache for sequences of at most `length` tokens.

    Layers of full attention write into memory that is there from the start; other kinds of layers
    (sliding windows, linear attention) keep the library's own.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        RoomyLayer(length) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer; a new token is written behind the others.

    The library's layer makes a new tensor of all tokens at every token.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, tokens so far, head size], these new ones included."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.rooms = [_room(x, self.length) for x in (key_states, value_states)]
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        for room, new in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, start:end] = new
        self._show(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the sequences `beam_idx`, in this order."""
        if not self.is_initialized:
            return
        end = self.get_seq_length()
        kept = [_room(room[:1], self.length, len(beam_idx)) for room in self.rooms]
        for new, room in zip(kept, self.rooms, strict=True):
            torch.index_select(room[:, :, :end], 0, beam_idx, out=new[:, :, :end])
        self.rooms = kept
        self._show(end)

    def _show(self, end: int) -> None:
        self.keys, self.values = (room[:, :, :end] for room in self.rooms)


def _room(like: Tensor, length: int, rows: int | None = None) -> Tensor:
    _, heads, _, size = like.shape
    return like.new_empty(len(like) if rows is None else rows, heads, length, size)
