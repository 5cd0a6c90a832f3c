"""Predictions of policy, reference and critic for responses, and scores of the reward."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lightning_rlhf.core import losses, masking, memory, records, shaping
from lightning_rlhf.core.logprobs import token_logprobs, vocabulary_kl
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.models.config import POLICY, REFERENCE, VALUE
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rewards.weighted import Reward


def response_hidden(roles: Roles, batch: records.Responses) -> Float[Tensor, "N d"]:
    """Return hidden states of the active role from which each real response token is predicted."""
    lengths, responses = records.row_lengths(batch)[:, :, None].unbind(dim=1)
    longest = int(lengths.max())
    tokens, _ = masking.from_first_real(batch.tokens, batch.mask, longest)
    after = torch.arange(1, longest, device=lengths.device)
    return roles.hidden_at(tokens[:, :-1], (after < lengths) & (after >= lengths - responses))


def response_logprobs(
    roles: Roles,
    hidden: Float[Tensor, "N d"],
    batch: records.Responses,
    temperature: float,
    *,
    learn_entropy: bool = False,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Return log-probability and entropy at each real response token, nats, row by row.

    learn_entropy: whether the entropy has a gradient too, which costs more.
    """
    return token_logprobs(
        hidden, masking.picker(records.known_mask(batch))(batch.responses), roles.head,
        temperature=temperature, vocab_size=roles.vocab_size,
        frozen_head=not (learn_entropy or roles.head_is_trained), row_multiple=roles.row_multiple,
    )  # fmt: skip


def response_kl(
    roles: Roles, hidden: Float[Tensor, "N d"], ref_hidden: Float[Tensor, "N d"], temperature: float
) -> Float[Tensor, " N"]:
    """Return the KL over the whole vocabulary of the active role to the reference, nats."""
    return vocabulary_kl(
        hidden, ref_hidden, roles.head, roles.reference.head, temperature=temperature,
        vocab_size=roles.vocab_size, row_multiple=roles.row_multiple,
    )  # fmt: skip


@torch.no_grad()
def score(
    roles: Roles,
    decoded: records.DecodedResponses,
    reward: Reward,
    *,
    temperature: float,
    batch_size: int,
    over_vocabulary: bool,
) -> records.Scores:
    """Return scores of the reward, and of the reference `batch_size` rows at a time.

    over_vocabulary: whether to measure the KL over the whole vocabulary too, by one more pass.
    """
    (components, parts), rollout, reference = reward(decoded), decoded.rollout, roles.reference

    def read(rows: records.SampledResponses) -> tuple[Tensor, ...]:
        with reference.use_role(REFERENCE):
            ref_hidden = response_hidden(reference, rows)
            logprobs, _ = response_logprobs(reference, ref_hidden, rows, temperature)
        if not over_vocabulary:
            return (logprobs,)
        hidden = response_hidden(roles, rows)
        return logprobs, response_kl(roles, hidden, ref_hidden, temperature)

    ref_logprobs, *kl = by_micro_batch(rollout, batch_size, read)
    return records.Scores(
        component_scores=components,
        score=shaping.weighted_sum(components, reward.terms),
        ref_logprobs=ref_logprobs,
        token_scores=parts,
        vocabulary_kl=kl[0] if kl else None,
    )


def padding_share(mask: Bool[Tensor, "B S"], batch_size: int) -> Float[Tensor, ""]:
    """Return the share of padding that `response_hidden` reads, `batch_size` rows at a time."""
    lengths = mask[masking.by_length(mask)].sum(dim=1) - 1
    read = sum(len(some) * some[-1] for some in lengths.split(batch_size))
    return 1 - lengths.sum() / read


def by_micro_batch(
    batch: records.Responses, size: int, read: Callable[[Any], tuple[Float[Tensor, " N"], ...]]
) -> list[Float[Tensor, "B T"]]:
    """Return numbers of each response token, 0 on padding.

    read: function that returns numbers of the N real response tokens of some rows, row by row. It
        is given `size` rows at a time, from the shortest to the longest.
    """
    order = masking.by_length(batch.mask)
    parts = [read(batch.select(rows)) for rows in order.split(size)]
    mask, place = batch.response_mask[order], order.argsort()
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return [x.new_zeros(mask.shape).masked_scatter(mask, x)[place] for x in columns]


@dataclass(frozen=True)
class Critic:
    """V(s_t), the value head on the hidden states of a role.

    On the policy's own trunk (role POLICY) it costs nothing while sampling. On an adapter or a
    separate model its loss has no gradient in the policy.
    """

    roles: Roles
    role: str

    @property
    def head(self) -> ScalarHeads:
        """Return the value head."""
        return self.roles.heads[VALUE]  # type: ignore[return-value]

    @property
    def shares_trunk(self) -> bool:
        """Return whether the head reads the policy's own hidden states."""
        return self.role == POLICY

    def values(
        self, batch: records.Responses, *, policy_hidden: Float[Tensor, "N d"] | None = None
    ) -> Float[Tensor, " N"]:
        """Return V before each real response token, row by row.

        policy_hidden: hidden states of the policy, if known; a critic on its trunk reads them.
        """
        if self.shares_trunk and policy_hidden is not None:
            return self.head(policy_hidden).squeeze(-1)
        with self.roles.use_role(self.role):
            return self.head(response_hidden(self.roles, batch)).squeeze(-1)

    @torch.no_grad()
    def all_values(self, batch: records.Responses, batch_size: int) -> Float[Tensor, "B T"]:
        """Return V before each response token, 0 on padding, `batch_size` rows at a time."""
        (values,) = by_micro_batch(batch, batch_size, lambda rows: (self.values(rows),))
        return values

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that only the critic trains."""
        yield from self.head.parameters()
        if not self.shares_trunk:
            yield from self.roles.trained_by(self.role)


def annotate(
    sampled: records.SampledResponses,
    roles: Roles,
    critic: Critic | None,
    *,
    is_exact: bool,
    temperature: float,
    policy_rows: memory.MicrobatchSize,
    batch_size: int,
) -> records.Rollout:
    """Return the responses with log-probabilities of the active role and values of the critic.

    Args:
        is_exact: `Sampler.is_exact`: whether the sampler's numbers are used and not recomputed.
        temperature: divisor of the logits, the same as while sampling.
        policy_rows: number of rows that the policy reads at a time, halved where the memory runs
            out.
        batch_size: number of rows that a critic on another trunk than the policy's reads at a time.
    """
    logprobs, values = (sampled.logprobs, sampled.values) if is_exact else (None, None)
    sampler_logprobs = None if is_exact else sampled.logprobs
    if logprobs is None:
        on_trunk = critic if critic is not None and critic.shares_trunk else None
        read = partial(predict, sampled, roles, on_trunk, temperature)
        logprobs, values = policy_rows.fitting(read)
    if values is None and critic is not None:
        values = critic.all_values(sampled, batch_size)
    values = torch.zeros_like(logprobs) if values is None else values
    found = {"logprobs": logprobs, "values": values, "sampler_logprobs": sampler_logprobs}
    return records.Rollout(**vars(sampled) | found)


@torch.no_grad()
def predict(
    batch: records.Responses, roles: Roles, critic: Critic | None, temperature: float, size: int
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
    """Return log-probabilities of the active role and values of the critic at each response token.

    Both are 0 on padding, read `size` rows at a time; values are None without a critic.
    """

    def read(rows: records.Responses) -> tuple[Tensor, ...]:
        hidden = response_hidden(roles, rows)
        logprobs, _ = response_logprobs(roles, hidden, rows, temperature)
        values = () if critic is None else (critic.values(rows, policy_hidden=hidden),)
        return (logprobs, *values)

    logprobs, *values = by_micro_batch(batch, size, read)
    return logprobs, values[0] if values else None


def policy_outputs(
    roles: Roles, hidden: Float[Tensor, "N d"], micro_batch: records.Experience, config: PPOConfig
) -> losses.PolicyOutputs:
    """Return the predictions of the active role for a micro-batch, with a gradient.

    hidden: hidden states of the role, as `response_hidden` returns them.
    """
    kl = None
    learn_entropy = config.ent_coef > 0 or bool(config.ent_coef_end)
    logprobs, entropy = response_logprobs(
        roles, hidden, micro_batch, config.temperature, learn_entropy=learn_entropy
    )
    if config.kl_in == "loss" and config.kl_estimator == "full":
        with torch.no_grad(), roles.reference.use_role(REFERENCE):
            ref_hidden = response_hidden(roles.reference, micro_batch)
        kl = response_kl(roles, hidden, ref_hidden, config.temperature)
    return losses.PolicyOutputs(logprobs=logprobs, entropy=entropy, vocabulary_kl=kl)
