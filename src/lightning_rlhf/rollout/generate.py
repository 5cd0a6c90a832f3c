"""Sampling responses from the acting role, with what it knew while it sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria

from lightning_rlhf.core.types import Prompts, Rollout
from lightning_rlhf.models.roles import Roles, position_ids


@torch.no_grad()
def generate(
    roles: Roles,
    prompts: Prompts,
    *,
    value: Callable[[Float[Tensor, "B d"]], Float[Tensor, " B"]],
    max_response_tokens: int,
    temperature: float,
    end_token_ids: Sequence[int],
    stop: StoppingCriteria | None = None,
    generator: torch.Generator,
) -> Rollout:
    """One response for each prompt, drawn from softmax(logits / temperature).

    A response ends with an end token, or where `stop` says so of its tokens so far.

    The generator gives one number per row and position before anything is sampled, so that what
    a prompt is answered does not depend on how long the other rows of its batch go on.

    Returns: responses right-padded to the longest of the batch.
    """
    batch = len(prompts)
    device = prompts.tokens.device
    uniforms = torch.rand(batch, max_response_tokens, generator=generator).to(device)
    end = torch.tensor(list(end_token_ids), device=device)
    cache = DynamicCache(config=roles.causal_lm.config)
    tokens, mask, position = prompts.tokens, prompts.mask, position_ids(prompts.mask)
    step_tokens = tokens
    going = torch.ones(batch, dtype=torch.bool, device=device)
    sampled, alive, logprobs, values = [], [], [], []
    for t in range(max_response_tokens):
        hidden = roles.causal_lm.base_model(
            input_ids=step_tokens,
            attention_mask=mask.long(),
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        distribution = torch.log_softmax(roles.head(hidden).float() / temperature, dim=-1)
        token = sample(distribution, uniforms[:, t])
        sampled.append(token)
        alive.append(going)
        logprobs.append(distribution.gather(-1, token[:, None]).squeeze(-1))
        values.append(value(hidden))
        mask = torch.cat([mask, going[:, None]], dim=1)
        position = position[:, -1:] + 1
        step_tokens = token[:, None]
        going = going & ~torch.isin(token, end)
        if stop is not None:
            going = going & ~stop(torch.stack(sampled, dim=1), None)
        if not going.any():
            break
    response_mask = torch.stack(alive, dim=1)
    return Rollout(
        tokens=torch.cat([tokens, torch.stack(sampled, dim=1)], dim=1),
        mask=mask,
        response_mask=response_mask,
        ended=~going,
        logprobs=torch.where(response_mask, torch.stack(logprobs, dim=1), 0),
        values=torch.where(response_mask, torch.stack(values, dim=1), 0),
        index=prompts.index,
    )


def sample(logprobs: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds `uniform`.

    `uniform` in [0, 1) is drawn in a little, so that rounding of the sum can never pick a token
    of probability 0 at the end of the vocabulary.
    """
    cdf = logprobs.exp().cumsum(-1)
    threshold = uniform[:, None] * (1 - 1e-6) * cdf[:, -1:]
    return torch.searchsorted(cdf, threshold, right=True).squeeze(-1)


def no_value(hidden: Float[Tensor, "B d"]) -> Float[Tensor, " B"]:
    """Where nobody asks for a value while sampling: 0."""
    return hidden.new_zeros(len(hidden), dtype=torch.float32)
