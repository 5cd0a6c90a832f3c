"""Sampling responses from the acting role, with what it knew while it sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria

from lightning_rlhf.core.types import Prompts, Rollout
from lightning_rlhf.kernels.decoding import DecodeStep, can_decode
from lightning_rlhf.kernels.products import compiles_by_shape
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.cache import roomy_cache
from lightning_rlhf.rollout.draft import Draft
from lightning_rlhf.rollout.sample import sample


@torch.no_grad()
def generate(
    roles: Roles,
    prompts: Prompts,
    *,
    value: Callable[[Float[Tensor, "B d"]], Float[Tensor, " B"]],
    max_response_tokens: int,
    temperature: float,
    end_token_ids: Sequence[int],
    samples_per_prompt: int = 1,
    stop: StoppingCriteria | None = None,
    generator: torch.Generator,
) -> Rollout:
    """Responses to each prompt, drawn from softmax(logits / temperature).

    A response ends with an end token, or where `stop` says so of its tokens so far.

    The generator gives one number per response and position before anything is sampled, so that
    what a prompt is answered does not depend on how long the other rows of its batch go on.

    Returns: `samples_per_prompt` responses to the first prompt, then those to the second, …,
    right-padded to the longest of all.
    """
    few_shapes = compiles_by_shape(roles.causal_lm.get_input_embeddings().weight)
    draft = Draft(prompts, samples_per_prompt, max_response_tokens, few_shapes=few_shapes)
    batch, room = draft.logprobs.shape
    uniforms = torch.rand(batch, room, generator=generator).to(draft.logprobs)
    end = torch.tensor(list(end_token_ids), device=roles.device)
    cache = roomy_cache(roles.causal_lm.config, draft.width + room)
    with roles.merged():
        hidden = last_hidden(roles, cache, prompts.tokens, prompts.mask, position_ids(prompts.mask))
        step = DecodeStep(roles.causal_lm, cache) if can_decode(roles.causal_lm, cache) else None
        head = step.head if step else roles.head
        if samples_per_prompt > 1:
            prompt = torch.arange(len(prompts), device=roles.device)
            prompt = prompt.repeat_interleave(samples_per_prompt)
            cache.reorder_cache(prompt)
            hidden = hidden[prompt]
        while True:
            logits = head(hidden).float()
            if temperature != 1:
                logits.div_(temperature)
            token, logprob = sample(logits, uniforms[draft.rows, draft.written])
            draft.write(token, logprob, value(hidden))
            draft.end(torch.isin(token, end))
            if stop is not None:
                draft.end(stop(draft.responses, None))
            count = int(draft.going.sum())
            if draft.written == room or count == 0:
                return draft.rollout()
            left = draft.put_aside(count)
            if left is not None:
                cache.reorder_cache(left)
            following = draft.latest, draft.seen, draft.latest_position
            hidden = step(*following) if step else last_hidden(roles, cache, *following)


def last_hidden(
    roles: Roles,
    cache: DynamicCache,
    tokens: Int[Tensor, "B N"],
    mask: Bool[Tensor, "B S"],
    positions: Int[Tensor, "B N"],
) -> Float[Tensor, "B d"]:
    """What the acting role predicts the next token from, N new tokens put behind the cached.

    mask: of all S tokens, the cached ones included.
    """
    return (
        roles.causal_lm.base_model(
            input_ids=tokens,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        .last_hidden_state[:, -1]
        .contiguous()
    )


def position_ids(mask: Bool[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """0 at the first real token, counting real tokens only; 0 on padding before it."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def no_value(hidden: Float[Tensor, "B d"]) -> Float[Tensor, " B"]:
    """Where nobody asks for a value while sampling: 0."""
    return hidden.new_zeros(len(hidden), dtype=torch.float32)
