"""What the policy, the reference and the reward source say of responses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.logprobs import token_logprobs
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


@torch.no_grad()
def score(
    roles: Roles, rollout: Rollout, reward: RewardSource, *, temperature: float, batch_size: int
) -> Scores:
    """Score a rollout with the reward source and the reference, `batch_size` rows at a time."""
    parts = []
    for part in rollout.split(batch_size):
        ref_logprobs = torch.zeros_like(part.logprobs)
        with roles.acting(REFERENCE):
            hidden = response_hidden(roles, part)
            ref_logprobs[part.response_mask], _ = response_logprobs(
                roles, hidden, part, temperature
            )
        parts.append(Scores(score=reward(part), ref_logprobs=ref_logprobs))
    return Scores(
        score=torch.cat([part.score for part in parts]),
        ref_logprobs=torch.cat([part.ref_logprobs for part in parts]),
    )
