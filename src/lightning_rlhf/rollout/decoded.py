"""Decoding of responses to text, and encoding of texts as responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.masking import real_tokens
from lightning_rlhf.core.types import DecodedResponses, SampledResponses
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.collate import pad
from lightning_rlhf.data.rows import Message
from lightning_rlhf.rewards.weighted import Source, checked

AT_ONCE = 256
"""Number of texts that are encoded at once; each source splits them into smaller batches."""


def decode_responses(
    rollout: SampledResponses, rows: Sequence[Mapping[str, Any]], chat: ChatFormat
) -> DecodedResponses:
    """Return the responses of a rollout as text, with the data rows of their prompts."""
    return DecodedResponses(
        rollout=rollout,
        rows=[rows[index] for index in rollout.index.tolist()],
        responses=[
            chat.decode_response(tokens)
            for tokens in real_tokens(rollout.responses, rollout.response_mask)
        ],
    )


def encode_responses(
    rows: Sequence[Mapping[str, Any]], responses: Sequence[str], chat: ChatFormat
) -> DecodedResponses:
    """Return texts as responses of the policy: left-padded prompts, an end token after each."""
    prompts = [chat.prompt_tokens(tuple(map(Message.of, row["messages"]))) for row in rows]
    encoded = [chat.response_tokens(text) for text in responses]
    rollout = as_responses(prompts, encoded, chat.pad_token_id)
    return DecodedResponses(rollout=rollout, rows=rows, responses=responses)


def as_responses(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int
) -> SampledResponses:
    """Return given responses, as tokens with their end tokens, in the form of sampled ones."""
    prompt, prompt_mask = pad(prompts, pad_id, "left")
    response, response_mask = pad(responses, pad_id, "right")
    return SampledResponses(
        tokens=torch.cat([prompt, response], dim=1),
        mask=torch.cat([prompt_mask, response_mask], dim=1),
        response_mask=response_mask,
        ended=torch.ones(len(prompts), dtype=torch.bool),
        logprobs=None,
        values=None,
        index=torch.arange(len(prompts)),
    )


@torch.no_grad()
def score_texts(
    source: Source,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    responses: Sequence[str],
    chat: ChatFormat,
    device: torch.device,
) -> Float[Tensor, " B"]:
    """Return a source's scores of texts, encoded as PPO's own responses are; on the CPU."""
    parts = []
    for start in range(0, len(rows), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        decoded = encode_responses(rows[some], responses[some], chat)
        decoded = DecodedResponses(
            rollout=decoded.rollout.to(device), rows=decoded.rows, responses=decoded.responses
        )
        parts.append(checked(source(decoded), decoded, name).cpu())
    return torch.cat(parts)
