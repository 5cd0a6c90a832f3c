"""Checks of padded batches: padding changes nothing that the models compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from lightning_rlhf.core.record import Record
from lightning_rlhf.core.types import (
    DecodedResponses,
    Demonstrations,
    Preferences,
    SampledResponses,
)
from lightning_rlhf.models.heads import ScalarHead
from lightning_rlhf.models.roles import VALUE
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.modules.sft import SFTModule
from lightning_rlhf.rewards.learned import LearnedReward, TextReward
from lightning_rlhf.rollout.annotate import predict
from lightning_rlhf.rollout.critic import Critic
from lightning_rlhf.rollout.decoded import decode_responses
from lightning_rlhf.stages.preflight.check import Check, at_most, difference, not_applicable

MORE = 3
"""Number of columns of padding that are added on a side."""
R = TypeVar("R", bound=Record)


def padding_of_policy(module: PPOModule, sampled: SampledResponses, limit: float) -> Check:
    """Check the log-probabilities of the policy."""

    def logprobs(batch: SampledResponses) -> Tensor:
        found, _ = predict(batch, module.roles, None, module.config.temperature, len(batch))
        return found[batch.response_mask]

    return compare("policy", logprobs, sampled, limit, "nats")


def padding_of_critic(module: PPOModule, sampled: SampledResponses, limit: float) -> Check:
    """Check the values of the critic, with random weights in its head, which may start at 0."""
    critic = module.critic
    if critic is None:
        reason = f"advantage={module.config.advantage} has no critic"
        return not_applicable("padding: critic", reason)

    def values(batch: SampledResponses) -> Tensor:
        assert critic is not None
        return critic.all_values(batch, len(batch))[batch.response_mask]

    with random_head(critic):
        return compare("critic", values, sampled, limit)


@contextmanager
def random_head(critic: Critic) -> Iterator[None]:
    """Replace the critic's value head by one with random weights inside."""
    heads, own = critic.roles.heads, critic.head
    generator = torch.Generator().manual_seed(0)
    other = ScalarHead(critic.roles.hidden_size)
    weight = torch.randn(other.linear.weight.shape, generator=generator)
    with torch.no_grad():
        other.linear.weight.copy_(weight / weight.norm())
    heads[VALUE] = other.to(own.linear.weight.device)
    try:
        yield
    finally:
        heads[VALUE] = own


def padding_of_rewards(
    module: PPOModule, sampled: SampledResponses, limit: float
) -> Iterator[Check]:
    """Yield a check of each component of the reward; functions and servers are not called."""
    decoded = decode_responses(sampled, module.collector.prompts["train"], module.chat)
    numbered = replace(sampled, index=torch.arange(len(sampled), device=sampled.index.device))
    for term, source in zip(module.reward.terms, module.reward.sources, strict=True):
        if not isinstance(source, LearnedReward | TextReward):
            reason = "a function or a server, which is not called"
            yield not_applicable(f"padding: {term.name}", reason)
            continue

        def rewards(batch: SampledResponses, source: LearnedReward | TextReward = source) -> Tensor:
            places = batch.index.tolist()
            return source(
                DecodedResponses(
                    rollout=batch,
                    rows=[decoded.rows[place] for place in places],
                    responses=[decoded.responses[place] for place in places],
                )
            )

        yield compare(term.name, rewards, numbered, limit)


def padding_of_sft(module: SFTModule, batch: Demonstrations, limit: float) -> Check:
    """Check the log-probabilities of the targets."""
    return compare("policy", module.logprobs, batch, limit, "nats")


def padding_of_pairs(module: RewardModule, batch: Preferences, limit: float) -> Check:
    """Check the rewards of the pairs, of all heads."""

    def rewards(batch: Preferences) -> Tensor:
        return torch.cat(module.rewards(batch), dim=1).flatten()

    return compare("reward", rewards, batch, limit)


def padding_of_dpo(module: DPOModule, batch: Preferences, limit: float) -> Check:
    """Check the log-probabilities of both sides of the pairs."""

    def logprobs(batch: Preferences) -> Tensor:
        scores = module.scores(batch)
        return torch.stack([scores.chosen_logprob, scores.rejected_logprob], dim=1).flatten()

    return compare("policy", logprobs, batch, limit, "nats")


def compare(
    role: str, numbers: Callable[[R], Tensor], batch: R, limit: float, unit: str = ""
) -> Check:
    """Compare the numbers of all rows at once, padded, with those of each row without padding.

    numbers: returns the same count of numbers for each copy of a row, row after row.
    """
    together = numbers(padded(batch))
    alone = [numbers(row) for row in unpadded(batch)]
    first = [pair[: len(pair) // 2] for pair in alone]
    return at_most(f"padding: {role}", difference(together, torch.cat(first)), limit, unit)


def padded(batch: R) -> R:
    """Return the batch with MORE columns of padding on each side that may have padding.

    All padding holds a token of the texts, which a model that reads it would notice.
    """
    match batch:
        case SampledResponses():
            tokens, mask = wider(batch.tokens, batch.mask, (MORE, MORE))
            response_mask = F.pad(batch.response_mask, (0, MORE))
            return replace(batch, tokens=tokens, mask=mask, response_mask=response_mask)
        case Demonstrations():
            tokens, mask = wider(batch.tokens, batch.mask, (0, MORE))
            target_mask = F.pad(batch.target_mask, (0, MORE))
            return replace(batch, tokens=tokens, mask=mask, target_mask=target_mask)
        case Preferences():
            chosen, chosen_mask = wider(batch.chosen, batch.chosen_mask, (0, MORE))
            rejected, rejected_mask = wider(batch.rejected, batch.rejected_mask, (0, MORE))
            return replace(
                batch, chosen=chosen, chosen_mask=chosen_mask, rejected=rejected,
                rejected_mask=rejected_mask,
            )  # fmt: skip
        case _:
            raise TypeError(f"{type(batch).__name__} is no batch of a stage")


def wider(
    tokens: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], sides: tuple[int, int]
) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Return tokens and mask with more columns of padding on the left and on the right."""
    filler = int(tokens[mask].amax())
    tokens = torch.where(mask, tokens, filler)
    return F.pad(tokens, sides, value=filler), F.pad(mask, sides)


def unpadded(batch: R) -> Iterator[R]:
    """Yield each row without its padding, beside a copy of itself."""
    for row in batch.split(1):
        match row:
            case SampledResponses():
                row = replace(
                    row,
                    tokens=row.tokens[:, row.mask[0]],
                    mask=row.mask[:, row.mask[0]],
                    response_mask=row.response_mask[:, row.response_mask[0]],
                )
            case Demonstrations():
                row = replace(
                    row,
                    tokens=row.tokens[:, row.mask[0]],
                    mask=row.mask[:, row.mask[0]],
                    target_mask=row.target_mask[:, row.mask[0]],
                )
            case Preferences():
                row = replace(
                    row,
                    chosen=row.chosen[:, row.chosen_mask[0]],
                    chosen_mask=row.chosen_mask[:, row.chosen_mask[0]],
                    rejected=row.rejected[:, row.rejected_mask[0]],
                    rejected_mask=row.rejected_mask[:, row.rejected_mask[0]],
                )
        yield row.repeat(2)
