"""What the policy, the reference and the reward source say of responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rlhf.core.logprobs import token_logprobs, vocabulary_kl
from lightning_rlhf.core.types import Experience, Rollout, Scores
from lightning_rlhf.models.roles import REFERENCE, Roles

RewardSource = Callable[[Rollout], Float[Tensor, " B"]]


def response_hidden(roles: Roles, batch: Rollout | Experience) -> Float[Tensor, "N d"]:
    """Hidden states of the acting role from which each real response token was predicted."""
    length = batch.response_mask.shape[1]
    hidden = roles.hidden(batch.tokens, batch.mask)[:, -length - 1 : -1]
    return hidden[batch.response_mask]


def response_logprobs(
    roles: Roles, hidden: Float[Tensor, "N d"], batch: Rollout | Experience, temperature: float
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability and entropy at each real response token, nats, row by row."""
    targets = batch.responses[batch.response_mask]
    return token_logprobs(
        hidden, targets, roles.head, temperature=temperature, vocab_size=roles.vocab_size
    )


def response_kl(
    roles: Roles,
    hidden: Float[Tensor, "N d"],
    ref_hidden: Float[Tensor, "N d"],
    temperature: float,
) -> Float[Tensor, " N"]:
    """KL over the whole vocabulary between what two roles' hidden states predict, nats."""
    return vocabulary_kl(
        hidden, ref_hidden, roles.head, temperature=temperature, vocab_size=roles.vocab_size
    )


@torch.no_grad()
def score(
    roles: Roles,
    rollout: Rollout,
    reward: RewardSource,
    *,
    temperature: float,
    batch_size: int,
    over_vocabulary: bool,
) -> Scores:
    """Score a rollout with the reward source and the reference, `batch_size` rows at a time.

    over_vocabulary: measure the KL over the whole vocabulary too, which reads every response with
        the policy once more.
    """
    rewards, logprobs, kls = [], [], []
    for part in rollout.split(batch_size):
        with roles.acting(REFERENCE):
            ref_hidden = response_hidden(roles, part)
            logprobs.append(response_logprobs(roles, ref_hidden, part, temperature)[0])
        if over_vocabulary:
            hidden = response_hidden(roles, part)
            kls.append(response_kl(roles, hidden, ref_hidden, temperature))
        rewards.append(reward(part))
    return Scores(
        score=torch.cat(rewards),
        ref_logprobs=spread(logprobs, rollout.response_mask),
        vocabulary_kl=spread(kls, rollout.response_mask) if over_vocabulary else None,
    )


def spread(parts: Sequence[Float[Tensor, " N"]], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Numbers of real tokens, row by row, at their places; 0 on padding."""
    found = torch.cat(list(parts))
    return found.new_zeros(mask.shape).masked_scatter(mask, found)
