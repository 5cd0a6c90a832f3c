"""State of a batch of responses during sampling, and the key-value cache of its trunk."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from lightning_rlhf.core.errors import LogitsError
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.kernels.products import rounded_up

MULTIPLE = 8  # with few_shapes, the number of active rows is a multiple of it, or 4, 2, 1
KEPT = 0.75  # rows that have ended are dropped when at most this share is unfinished
ASKED = 8
"""Number of tokens after which a device other than the CPU is asked which rows have ended. The
answer waits for all that was launched. At 8 that is an eighth of the tokens, and a batch whose rows
have all ended goes on for at most 7 more, which are cut off."""


class DecodeState:
    """Buffers for the responses of a batch, filled column by column.

    Letters: B responses in all, A active rows, which are not dropped yet, P prompt tokens, T
    response tokens.
    """

    def __init__(
        self,
        prompts: Prompts,
        samples_per_prompt: int,
        max_response_tokens: int,
        *,
        few_shapes: bool = False,
    ) -> None:
        """Allocate the state; few_shapes: drop some rows later, so that fewer shapes occur."""
        prompts = prompts.repeat(samples_per_prompt)
        batch, self.width = prompts.tokens.shape
        room = batch, max_response_tokens
        self.index = prompts.index
        self.tokens = torch.cat([prompts.tokens, prompts.tokens.new_zeros(room)], dim=1)
        self.mask = torch.cat([prompts.mask, prompts.mask.new_zeros(room)], dim=1)
        self.logprobs = prompts.tokens.new_zeros(room, dtype=torch.float32)
        self.values: Float[Tensor, "B T"] | None = None
        """Values of the critic; None until one is appended."""
        self.prompt_tokens = prompts.mask.sum(dim=1)
        self.few_shapes = few_shapes
        self.length = 0
        """Number of columns of response tokens so far, T."""
        self.rows = torch.arange(batch, device=prompts.tokens.device)
        """Rows of the responses that are active, [A]."""
        self.unfinished = torch.ones_like(self.rows, dtype=torch.bool)
        """True where an active row has not ended, [A]."""

    @property
    def responses(self) -> Int[Tensor, "A T"]:
        """Return the response tokens so far; any id after a response's end."""
        return self.tokens[self.rows, self.width : self.width + self.length]

    @property
    def latest(self) -> Int[Tensor, "A 1"]:
        """Return the token appended last."""
        return self.tokens[self.rows, self.width + self.length - 1, None]

    @property
    def latest_position(self) -> Int[Tensor, "A 1"]:
        """Return the position of `latest` among the real tokens of its row."""
        return self.prompt_tokens[self.rows, None] + self.length - 1

    @property
    def attention_mask(self) -> Bool[Tensor, "A P+T"]:
        """Return a mask, True on the tokens that the next token may attend to."""
        return self.mask[self.rows, : self.width + self.length]

    def append(
        self,
        token: Int[Tensor, " A"],
        logprob: Float[Tensor, " A"],
        value: Float[Tensor, " A"] | None,
    ) -> None:
        """Add a token to each active row; it counts where the response has not ended."""
        column = self.length
        self.tokens[self.rows, self.width + column] = token
        self.mask[self.rows, self.width + column] = self.unfinished
        self.logprobs[self.rows, column] = logprob
        if value is not None:
            if self.values is None:
                self.values = torch.zeros_like(self.logprobs)
            self.values[self.rows, column] = value
        self.length += 1

    def end(self, ended: Bool[Tensor, " A"]) -> None:
        """Mark active rows whose response ends with the token appended last."""
        self.unfinished = self.unfinished & ~ended

    def drop_ended(self, count: int) -> Int[Tensor, " A"] | None:
        """Drop rows that have ended if that saves time; return the rows kept, or None for all.

        With few_shapes, some rows that have ended are kept too.
        count: number of rows that have not ended.
        """
        kept = count
        if self.few_shapes:
            kept = min(rounded_up(count, MULTIPLE), 1 << (count - 1).bit_length())
        if kept > KEPT * len(self.rows):
            return None
        left = self.unfinished.long().argsort(descending=True, stable=True)[:kept]
        self.rows, self.unfinished = self.rows[left], self.unfinished[left]
        return left

    def sampled(self) -> SampledResponses:
        """Return all responses, right-padded to the longest.

        Raises: LogitsError where a token was drawn from logits that are not finite.
        """
        mask = self.mask[:, self.width : self.width + self.length]
        finite, longest = torch.stack(
            [self.logprobs.isfinite().all().long(), mask.any(dim=0).sum()]
        ).tolist()
        if not finite:
            raise LogitsError
        end, mask = self.width + longest, mask[:, :longest]
        ended = torch.ones_like(self.index, dtype=torch.bool)
        ended[self.rows] = ~self.unfinished
        values = self.values
        if values is not None:
            values = torch.where(mask, values[:, :longest], 0)
        return SampledResponses(
            tokens=self.tokens[:, :end],
            mask=self.mask[:, :end],
            response_mask=mask,
            ended=ended,
            logprobs=torch.where(mask, self.logprobs[:, :longest], 0),
            values=values,
            index=self.index,
        )


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
