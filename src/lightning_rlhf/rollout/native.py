"""Sampling by the package's own decode loop, which also returns log-probabilities and values."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.kernels.decoder import family
from lightning_rlhf.kernels.decoding import decode_step
from lightning_rlhf.models.heads import ScalarHead
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.decode_state import ASKED, DecodeState, roomy_cache
from lightning_rlhf.rollout.sampler import SamplingParams, Share


def draw_tokens(
    logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Draw tokens by inverse-CDF sampling: the first with cumulative probability above `uniform`.

    This has two levels: the vocabulary is summed in about sqrt(V) blocks, and only the block that
    contains the number is summed token by token. `uniform` in [0, 1) is scaled down slightly, so
    that rounding of the sums can never select a token of probability 0.

    logits: fp32, at temperature 1.
    Returns: the tokens, and their log-probabilities in nats; NaN for a row without a distribution.
    """
    size = logits.shape[1]
    block = math.isqrt(size - 1) + 1
    probability = torch.softmax(logits, -1)
    whole = size // block
    masses = probability[:, : whole * block].unflatten(1, (whole, block)).sum(-1)
    masses = torch.cat([masses, probability[:, whole * block :].sum(-1, keepdim=True)], dim=1)
    ends = cumulative(masses)
    target = uniform[:, None] * (1 - 1e-6) * ends[:, -1:]
    chosen = torch.searchsorted(ends, target, right=True).clamp(max=whole)
    before = F.pad(ends, (1, 0)).gather(1, chosen)
    places = chosen * block + torch.arange(block, device=logits.device)
    inside = cumulative(probability.gather(1, places.clamp(max=size - 1)))
    rest = (target - before).clamp(min=0).minimum(inside[:, -1:] * (1 - 1e-6))
    token = chosen * block + torch.searchsorted(inside, rest, right=True)
    token = token.clamp(max=size - 1)
    # The sum of blocks is nearer to 1 than the sum by which softmax divided.
    logprob = (probability.gather(1, token) / masses.sum(-1, keepdim=True)).log()
    return token.squeeze(1), logprob.squeeze(1)


def cumulative(mass: Float[Tensor, "B n"]) -> Float[Tensor, "B n"]:
    """Return the cumulative sum, which is constant where there is no mass, and never falls.

    A GPU's cumulative sum may fall by a rounding, and may rise where there is no mass.
    """
    return torch.where(mass > 0, mass.cumsum(-1), 0).cummax(-1).values


class NativeSampler:
    """Samples from the active role, whose adapter is merged into the weights during sampling.

    Rows that have ended are dropped from the batch. The generator draws one number per response and
    position before sampling, so that the response to a prompt does not depend on the lengths of the
    others in its batch.
    """

    is_exact = True

    def __init__(
        self, roles: Roles, params: SamplingParams, value_head: ScalarHead | None = None
    ) -> None:
        """Make the sampler; value_head: head of a critic on its trunk; None for no values."""
        self.roles = roles
        self.params = params
        self.value_head = value_head

    def draw(self, responses: int, generator: torch.Generator) -> Float[Tensor, "B T"]:
        """Return the random numbers of a batch of so many responses, on the CPU."""
        return torch.rand(responses, self.params.max_response_tokens, generator=generator)

    @torch.no_grad()
    def sample(
        self,
        prompts: Prompts,
        samples_per_prompt: int,
        generator: torch.Generator,
        share: Share | None = None,
    ) -> SampledResponses:
        """Return responses with their log-probabilities and values, as `Sampler.sample`.

        share: place of the prompts in their batch; None where they are the whole batch.
        """
        roles, params = self.roles, self.params
        state = DecodeState(
            prompts,
            samples_per_prompt,
            params.max_response_tokens,
            few_shapes=roles.row_multiple > 1,
        )
        batch, room = state.logprobs.shape
        asked = 1 if roles.device.type == "cpu" else ASKED
        total = batch if share is None else share.total * samples_per_prompt
        uniforms = self.draw(total, generator)
        if share is not None:
            uniforms = uniforms[share.responses(samples_per_prompt).cpu()]
        uniforms = uniforms.to(state.logprobs)
        end = torch.tensor(list(params.end_token_ids), device=roles.device)
        cache = roomy_cache(roles.causal_lm.config, state.width + room)
        with roles.merged():
            hidden = last_hidden(
                roles, cache, prompts.tokens, prompts.mask, position_ids(prompts.mask)
            )
            step = decode_step(roles.causal_lm, cache) if roles.copies_weights else None
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
                value = self.value_head(hidden) if self.value_head is not None else None
                state.append(token, logprob, value)
                state.end(torch.isin(token, end))
                if params.stop is not None:
                    state.end(params.stop(state.responses, None))
                if state.length == room:
                    return state.sampled()
                if state.length % asked == 0:
                    count = int(state.unfinished.sum())
                    if count == 0:
                        return state.sampled()
                    left = state.drop_ended(count)
                    if left is not None:
                        cache.reorder_cache(left)
                following = state.latest, state.attention_mask, state.latest_position
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
    attention_mask = mask.long()
    if tokens.shape[1] == 1 and mask.device.type != "cpu" and family(roles.causal_lm) is not None:
        # Transformers reads a mask [B, S] from the device, and takes one of four dimensions as it
        # is.
        attention_mask = mask[:, None, None]
    return (
        roles.causal_lm.base_model(
            input_ids=tokens,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        .last_hidden_state[:, -1]
        .contiguous()
    )


def position_ids(mask: Bool[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """Return positions that count real tokens only, from 0; 0 on padding before the first."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
