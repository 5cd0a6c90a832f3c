"""Log-probability and entropy of tokens, from hidden states, without all logits alive at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")
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
    chunks = _in_chunks(_token_chunk, (hidden, targets), head, temperature, vocab_size)
    logprobs, entropy = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def vocabulary_kl(
    hidden: Float[Tensor, "N d"],
    ref_hidden: Float[Tensor, "N d"],
    head: Head,
    *,
    temperature: float,
    vocab_size: int,
) -> Float[Tensor, " N"]:
    """Exact KL of the distribution after `hidden[i]` to the one after `ref_hidden[i]`.

        sum_v p_v (log p_v - log q_v)

    In chunks as `token_logprobs`, half as many tokens at a time. Returns: fp32, nats.
    """
    chunks = _in_chunks(_kl_chunk, (hidden, ref_hidden), head, temperature, 2 * vocab_size)
    return torch.cat(list(chunks))


def _in_chunks(
    compute: Callable[..., T],
    rows: tuple[Tensor, Tensor],
    head: Head,
    temperature: float,
    logits_per_row: int,
) -> Iterator[T]:
    """`compute` on a few rows at a time; its logits are not kept but computed again backwards."""
    size = max(1, CHUNK_ELEMENTS // logits_per_row)
    recompute = torch.is_grad_enabled() and len(rows[0]) > size
    for chunk in zip(*(x.split(size) for x in rows), strict=True):
        if recompute:
            yield checkpoint(compute, *chunk, head, temperature, use_reentrant=False)
        else:
            yield compute(*chunk, head, temperature)


def _kl_chunk(
    hidden: Float[Tensor, "N d"], ref_hidden: Float[Tensor, "N d"], head: Head, temperature: float
) -> Float[Tensor, " N"]:
    p, q = (torch.log_softmax(head(h).float() / temperature, -1) for h in (hidden, ref_hidden))
    return (p.exp() * (p - q)).sum(-1)


def _token_chunk(
    hidden: Float[Tensor, "N d"], targets: Int[Tensor, " N"], head: Head, temperature: float
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    logprobs = torch.log_softmax(head(hidden).float() / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy
