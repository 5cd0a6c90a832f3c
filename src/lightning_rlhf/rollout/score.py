"""Predictions of policy and reference for responses, and scores of the reward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rlhf.core.logprobs import token_logprobs, vocabulary_kl
from lightning_rlhf.core.masking import by_length, from_first_real, picker
from lightning_rlhf.core.shaping import weighted_sum
from lightning_rlhf.core.types import (
    DecodedResponses,
    Experience,
    SampledResponses,
    Scores,
    known_mask,
    row_lengths,
)
from lightning_rlhf.models.roles import REFERENCE, Roles
from lightning_rlhf.rewards.weighted import Reward


def response_hidden(roles: Roles, batch: SampledResponses | Experience) -> Float[Tensor, "N d"]:
    """Return hidden states of the active role from which each real response token is predicted.

    The trunk reads every row from its first real token up to its last but one, from which nothing
    is predicted.
    """
    lengths, responses = row_lengths(batch)[:, :, None].unbind(dim=1)
    longest = int(lengths.max())
    tokens, _ = from_first_real(batch.tokens, batch.mask, longest)
    after = torch.arange(1, longest, device=lengths.device)
    return roles.hidden_at(tokens[:, :-1], (after < lengths) & (after >= lengths - responses))


def response_logprobs(
    roles: Roles,
    hidden: Float[Tensor, "N d"],
    batch: SampledResponses | Experience,
    temperature: float,
    *,
    learn_entropy: bool = False,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Return log-probability and entropy at each real response token, nats, row by row.

    learn_entropy: whether the entropy has a gradient too, which costs more.
    """
    return token_logprobs(
        hidden,
        picker(known_mask(batch))(batch.responses),
        roles.head,
        temperature=temperature,
        vocab_size=roles.vocab_size,
        frozen_head=not (learn_entropy or roles.head_is_trained),
        row_multiple=roles.row_multiple,
    )


def response_kl(
    roles: Roles,
    hidden: Float[Tensor, "N d"],
    ref_hidden: Float[Tensor, "N d"],
    temperature: float,
) -> Float[Tensor, " N"]:
    """Return the KL over the whole vocabulary between the predictions of two roles, nats."""
    return vocabulary_kl(
        hidden, ref_hidden, roles.head, temperature=temperature, vocab_size=roles.vocab_size,
        row_multiple=roles.row_multiple,
    )  # fmt: skip


@torch.no_grad()
def score(
    roles: Roles,
    decoded: DecodedResponses,
    reward: Reward,
    *,
    temperature: float,
    batch_size: int,
    over_vocabulary: bool,
) -> Scores:
    """Return scores of the reward, and of the reference `batch_size` rows at a time.

    over_vocabulary: whether to measure the KL over the whole vocabulary too, which needs one more
        forward pass of the active role over every response.
    """
    components = reward(decoded)
    rollout = decoded.rollout
    order = by_length(rollout.mask)
    logprobs, kls = [], []
    for rows in order.split(batch_size):
        micro_batch = rollout.select(rows)
        with roles.use_role(REFERENCE):
            ref_hidden = response_hidden(roles, micro_batch)
            logprobs.append(response_logprobs(roles, ref_hidden, micro_batch, temperature)[0])
        if over_vocabulary:
            hidden = response_hidden(roles, micro_batch)
            kls.append(response_kl(roles, hidden, ref_hidden, temperature))
    mask, place = rollout.response_mask[order], order.argsort()
    return Scores(
        component_scores=components,
        score=weighted_sum(components, reward.terms),
        ref_logprobs=scatter(logprobs, mask)[place],
        vocabulary_kl=scatter(kls, mask)[place] if over_vocabulary else None,
    )


def padding_share(mask: Bool[Tensor, "B S"], batch_size: int) -> Float[Tensor, ""]:
    """Return the share of padding that `response_hidden` reads, `batch_size` rows at a time."""
    lengths = mask[by_length(mask)].sum(dim=1) - 1
    read = sum(len(some) * some[-1] for some in lengths.split(batch_size))
    return 1 - lengths.sum() / read


def scatter(
    columns: Sequence[Float[Tensor, " N"]], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return numbers of real tokens, given row by row, as padded rows; 0 on padding."""
    found = torch.cat(list(columns))
    return found.new_zeros(mask.shape).masked_scatter(mask, found)
