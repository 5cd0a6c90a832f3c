"""Sampling by the package's own decode loop, which also returns log-probabilities and values."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from lightning_rlhf.core.errors import LogitsError
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.kernels import decoder, decoding, layers
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.sampler import BatchSampler, Share, draw_tokens, response_numbers

MULTIPLE = 8  # with few_shapes, the number of active rows is a multiple of it, or 4, 2, 1
KEPT = 0.75  # rows that have ended are dropped when at most this share is unfinished
INTERVAL = 8
"""Number of tokens after which the rows that have ended are read from a device other than the CPU,
which waits for all that was launched. What comes after the end, at most 7 tokens, is cut off."""


class DecodeState:
    """Buffers for the responses of a batch, filled column by column.

    Letters: B responses, A active rows, not dropped yet, P prompt tokens, T response tokens.
    """

    def __init__(self, prompts: Prompts, most: int, *, few_shapes: bool = False) -> None:
        """Allocate the state of at most `most` tokens for a response to each prompt.

        few_shapes: drop some rows later, so that fewer shapes occur.
        """
        batch, self.width = prompts.tokens.shape
        room = batch, most
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
    def following(self) -> tuple[Int[Tensor, "A 1"], Bool[Tensor, "A P+T"], Int[Tensor, "A 1"]]:
        """Return what the next step reads: the token appended last, a mask, True on the tokens that
        it may attend to, and its position among the real tokens of its row."""
        end = self.width + self.length
        position = self.prompt_tokens[self.rows, None] + self.length - 1
        return self.tokens[self.rows, end - 1, None], self.mask[self.rows, :end], position

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

        count: number of rows that have not ended. With few_shapes, some others are kept too.
        """
        kept = count
        if self.few_shapes:
            kept = min(layers.rounded_up(count, MULTIPLE), 1 << (count - 1).bit_length())
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
        is_finite = self.logprobs.isfinite().all().long()
        finite, longest = torch.stack([is_finite, mask.any(dim=0).sum()]).tolist()
        if not finite:
            raise LogitsError
        end, mask = self.width + longest, mask[:, :longest]
        ended = torch.ones_like(self.index, dtype=torch.bool)
        ended[self.rows] = ~self.unfinished
        logprobs, values = (
            None if x is None else torch.where(mask, x[:, :longest], 0)
            for x in (self.logprobs, self.values)
        )
        return SampledResponses(
            tokens=self.tokens[:, :end], mask=self.mask[:, :end], response_mask=mask, ended=ended,
            logprobs=logprobs, values=values, index=self.index,
        )  # fmt: skip


@dataclass(eq=False)
class NativeSampler(BatchSampler):
    """Samples from the active role, whose adapter is merged into the weights during sampling.

    Rows that have ended are dropped, which changes no other response.
    """

    value_head: ScalarHeads | None = None
    """Head of a critic on the policy's trunk; None for no values."""

    @torch.no_grad()
    def sample(
        self, prompts: Prompts, samples_per_prompt: int, generator: torch.Generator, share: Share
    ) -> SampledResponses:
        """Return responses with their log-probabilities and values, as `Sampler.sample`."""
        roles, params, model = self.roles, self.params, self.roles.causal_lm
        numbers = response_numbers(share, samples_per_prompt).cpu()
        uniforms = self.draw(len(prompts) * samples_per_prompt, generator)[numbers]
        prompts = prompts.select(share)
        few_shapes = roles.row_multiple > 1
        room = params.max_response_tokens
        state = DecodeState(prompts.repeat(samples_per_prompt), room, few_shapes=few_shapes)
        interval = 1 if roles.device.type == "cpu" else INTERVAL
        uniforms = uniforms.to(state.logprobs)
        end = torch.tensor(list(params.end_token_ids), device=roles.device)
        cache = DynamicCache(config=model.config)
        with roles.merged():
            at = position_ids(prompts.mask)
            hidden = last_hidden(roles, cache, prompts.tokens, prompts.mask, at)
            step = decoding.decode_step(model, cache) if roles.kernels.kind == "fast" else None
            head = step.head if step else roles.head
            if samples_per_prompt > 1:
                prompt = torch.arange(len(prompts), device=roles.device)
                prompt = prompt.repeat_interleave(samples_per_prompt)
                cache.reorder_cache(prompt)
                hidden = hidden[prompt]
            while True:
                logits = head(hidden).float()
                if params.temperature != 1:
                    logits.div_(params.temperature)
                token, logprob = draw_tokens(logits, uniforms[state.rows, state.length])
                value = None if self.value_head is None else self.value_head(hidden).squeeze(-1)
                state.append(token, logprob, value)
                state.end(torch.isin(token, end))
                if params.stop is not None:
                    state.end(params.stop(state.responses, None))
                if state.length == room:
                    return state.sampled()
                if state.length % interval == 0:
                    count = int(state.unfinished.sum())
                    if count == 0:
                        return state.sampled()
                    left = state.drop_ended(count)
                    if left is not None:
                        cache.reorder_cache(left)
                following = state.following
                hidden = step(*following) if step else last_hidden(roles, cache, *following)


def last_hidden(
    roles: Roles,
    cache: DynamicCache,
    tokens: Int[Tensor, "B N"],
    mask: Bool[Tensor, "B S"],
    positions: Int[Tensor, "B N"],
) -> Float[Tensor, "B d"]:
    """Return the hidden states after N new tokens, from which the next token is predicted.

    mask: mask of all S tokens, the cached ones included.
    """
    model, attention_mask = roles.causal_lm, mask.long()
    if tokens.shape[1] == 1 and mask.device.type != "cpu" and decoder.family(model) is not None:
        # transformers reads a mask [B, S] from the device, and one of four dimensions not.
        attention_mask = mask[:, None, None]
    inputs = {"input_ids": tokens, "attention_mask": attention_mask, "position_ids": positions}
    found = model.base_model(**inputs, **{str(roles.cache_argument): cache}, use_cache=True)
    return found.last_hidden_state[:, -1].contiguous()


def position_ids(mask: Bool[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """Return positions that count real tokens only, from 0; 0 on padding before the first."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
