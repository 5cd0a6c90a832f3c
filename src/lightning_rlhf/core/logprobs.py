"""Log-probability and entropy of tokens, from hidden states, without all logits alive at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Float[Tensor, "N d"]], Float[Tensor, "N V"]]
CHUNK_ELEMENTS = 16_000_000  # logits alive at once: 64 MB in fp32, whatever the vocabulary


def token_logprobs(
    hidden: Float[Tensor, "N d"],
    targets: Int[Tensor, " N"],
    head: Head,
    *,
    temperature: float,
    vocab_size: int,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of `targets[i]` and entropy of the distribution after `hidden[i]`.

        log softmax(head(hidden) / temperature)[target],   H = -sum_v p_v log p_v

    Tokens go through the head in chunks of at most CHUNK_ELEMENTS logits; where there are
    several, the backward pass computes each chunk's logits again instead of keeping them.

    Returns: logprobs and entropy, fp32, nats.
    """
    rows = max(1, CHUNK_ELEMENTS // vocab_size)
    recompute = torch.is_grad_enabled() and len(hidden) > rows
    chunks = [
        checkpoint(_chunk, h, t, head, temperature, use_reentrant=False)
        if recompute
        else _chunk(h, t, head, temperature)
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    logprobs, entropy = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def _chunk(
    hidden: Float[Tensor, "N d"], targets: Int[Tensor, " N"], head: Head, temperature: float
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    logprobs = torch.log_softmax(head(hidden).float() / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy
