"""Predictions of the training model for sampled responses, where the sampler returned none."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.device_memory import MicrobatchSize
from lightning_rlhf.core.masking import by_length
from lightning_rlhf.core.types import Experience, Rollout, SampledResponses
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.critic import Critic
from lightning_rlhf.rollout.score import response_hidden, response_logprobs, scatter


def annotate(
    sampled: SampledResponses,
    roles: Roles,
    critic: Critic | None,
    *,
    is_exact: bool,
    temperature: float,
    policy_rows: MicrobatchSize,
    batch_size: int,
) -> Rollout:
    """Return the responses with log-probabilities of the active role and values of the critic.

    Args:
        is_exact: `Sampler.is_exact`: whether the sampler's numbers are used and not recomputed.
        temperature: divisor of the logits, the same as while sampling.
        policy_rows: number of rows that the policy reads at a time, halved where the memory runs
            out.
        batch_size: number of rows that a critic on another trunk than the policy's reads at a time.
    """
    logprobs, values = (sampled.logprobs, sampled.values) if is_exact else (None, None)
    if logprobs is None:
        on_trunk = critic if critic is not None and critic.shares_trunk else None
        logprobs, values = policy_rows.fitting(
            partial(predict, sampled, roles, on_trunk, temperature)
        )
    if values is None and critic is not None:
        values = critic.all_values(sampled, batch_size)
    return Rollout(
        tokens=sampled.tokens,
        mask=sampled.mask,
        response_mask=sampled.response_mask,
        ended=sampled.ended,
        logprobs=logprobs,
        values=torch.zeros_like(logprobs) if values is None else values,
        index=sampled.index,
    )


@torch.no_grad()
def predict(
    batch: SampledResponses | Experience,
    roles: Roles,
    critic: Critic | None,
    temperature: float,
    batch_size: int,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
    """Return log-probabilities of the active role and values of the critic at each response token.

    Both are 0 on padding and computed `batch_size` rows at a time; values are None without a
    critic.
    """
    order = by_length(batch.mask)
    logprobs, values = [], []
    for rows in order.split(batch_size):
        micro_batch = batch.select(rows)
        hidden = response_hidden(roles, micro_batch)
        logprobs.append(response_logprobs(roles, hidden, micro_batch, temperature)[0])
        if critic is not None:
            values.append(critic.values(micro_batch, policy_hidden=hidden))
    mask, place = batch.response_mask[order], order.argsort()
    return (
        scatter(logprobs, mask)[place],
        scatter(values, mask)[place] if critic is not None else None,
    )
