"""Responses while they are being written."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rlhf.core.errors import DivergedError
from lightning_rlhf.core.types import Prompts, Rollout
from lightning_rlhf.kernels.products import rounded_up

DIVERGED = "the model's logits are NaN or infinite, and nothing can be sampled from it"
REMEDY = "Where it was trained until here, a smaller learning rate may hold it"
MULTIPLE = 8  # where shapes are to be few, a multiple of it is left of the rows, or 4, 2, 1
KEPT = 0.75  # rows that have ended are put aside when no more than this share goes on


class Draft:
    """Room for the responses of a batch, written column by column.

    Letters: B responses in all, A of them not put aside yet, P prompt tokens, T response tokens.
    """

    def __init__(
        self,
        prompts: Prompts,
        samples_per_prompt: int,
        max_response_tokens: int,
        *,
        few_shapes: bool = False,
    ) -> None:
        """few_shapes: a few rows are put aside later than they could be."""
        prompts = prompts.repeat(samples_per_prompt)
        batch, self.width = prompts.tokens.shape
        room = batch, max_response_tokens
        self.index = prompts.index
        self.tokens = torch.cat([prompts.tokens, prompts.tokens.new_zeros(room)], dim=1)
        self.mask = torch.cat([prompts.mask, prompts.mask.new_zeros(room)], dim=1)
        self.logprobs = prompts.tokens.new_zeros(room, dtype=torch.float32)
        self.values = torch.zeros_like(self.logprobs)
        self.prompt_tokens = prompts.mask.sum(dim=1)
        self.few_shapes = few_shapes
        self.written = 0
        """Columns of response tokens, T so far."""
        self.rows = torch.arange(batch, device=prompts.tokens.device)
        """Of the responses that are not put aside, [A]."""
        self.going = torch.ones_like(self.rows, dtype=torch.bool)
        """Of these, what has not ended, [A]."""

    @property
    def responses(self) -> Int[Tensor, "A T"]:
        """What is written so far; any id behind a response's end."""
        return self.tokens[self.rows, self.width : self.width + self.written]

    @property
    def latest(self) -> Int[Tensor, "A 1"]:
        return self.tokens[self.rows, self.width + self.written - 1, None]

    @property
    def latest_position(self) -> Int[Tensor, "A 1"]:
        """Of `latest` among the real tokens of its row."""
        return self.prompt_tokens[self.rows, None] + self.written - 1

    @property
    def seen(self) -> Bool[Tensor, "A P+T"]:
        """True on what the next token may look at."""
        return self.mask[self.rows, : self.width + self.written]

    def write(
        self,
        token: Int[Tensor, " A"],
        logprob: Float[Tensor, " A"],
        value: Float[Tensor, " A"],
    ) -> None:
        """One more token of each response; it counts where the response has not ended."""
        column = self.written
        self.tokens[self.rows, self.width + column] = token
        self.mask[self.rows, self.width + column] = self.going
        self.logprobs[self.rows, column] = logprob
        self.values[self.rows, column] = value
        self.written += 1

    def end(self, over: Bool[Tensor, " A"]) -> None:
        """These have ended with the token written last."""
        self.going = self.going & ~over

    def put_aside(self, count: int) -> Int[Tensor, " A"] | None:
        """Drop what has ended if that is worth it: which of the rows are left, or None for all.

        Where shapes are to be few, some rows that have ended are left too.
        count: of the responses that go on.
        """
        kept = count
        if self.few_shapes:
            kept = min(rounded_up(count, MULTIPLE), 1 << (count - 1).bit_length())
        if kept > KEPT * len(self.rows):
            return None
        left = self.going.long().argsort(descending=True, stable=True)[:kept]
        self.rows, self.going = self.rows[left], self.going[left]
        return left

    def rollout(self) -> Rollout:
        """All responses, right-padded to the longest.

        Raises: DivergedError where a token came from no distribution.
        """
        if not self.logprobs.isfinite().all():
            raise DivergedError(f"{DIVERGED}. {REMEDY}")
        end = self.width + self.written
        ended = torch.ones_like(self.index, dtype=torch.bool)
        ended[self.rows[self.going]] = False
        mask = self.mask[:, self.width : end]
        return Rollout(
            tokens=self.tokens[:, :end],
            mask=self.mask[:, :end],
            response_mask=mask,
            ended=ended,
            logprobs=torch.where(mask, self.logprobs[:, : self.written], 0),
            values=torch.where(mask, self.values[:, : self.written], 0),
            index=self.index,
        )
