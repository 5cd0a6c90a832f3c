"""Records that flow through the stages, and how one is moved, selected, split and joined.

Every record is frozen: a step returns a new one and never changes its arguments.
Letters: B sequences, P prompt tokens, T response tokens, S tokens of a whole sequence.
Masks are boolean, True = real token. The value on padding is stated per field.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from lightning_rlhf.core.masking import real_tokens, upload


@dataclass(frozen=True, kw_only=True)
class Record:
    """A bundle of tensors that share their first dimension, the sequences."""

    ON_CPU: ClassVar[tuple[str, ...]] = ()
    """Fields that stay on the CPU, so that shapes follow from them without waiting for a device."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the same record on `device`, but for `ON_CPU`; Lightning calls it on a batch."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking), but=self.ON_CPU)

    def select(self, rows: Int[Tensor, " M"] | slice) -> Self:
        """Return the sequences `rows` of every field; numbers on the CPU choose on any device."""
        if isinstance(rows, slice):
            return self._map(lambda tensor: tensor[rows])
        uploaded = {rows.device: rows}

        def chosen(tensor: Tensor) -> Tensor:
            if tensor.device not in uploaded:
                uploaded[tensor.device] = upload(rows, tensor.device)
            return tensor[uploaded[tensor.device]]

        return self._map(chosen)

    def repeat(self, times: int) -> Self:
        """Return every sequence `times` times in a row."""
        return self._map(lambda tensor: tensor.repeat_interleave(times, dim=0))

    def split(self, size: int) -> Iterator[Self]:
        """Yield consecutive records of `size` sequences; the last may be shorter."""
        for start in range(0, len(self), size):
            yield self.select(slice(start, start + size))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the records of all parts as one, in order; they have the same fields.

        Rows of fewer columns are padded on the right with 0 or False.
        """
        names = [f.name for f in fields(parts[0]) if getattr(parts[0], f.name) is not None]
        return replace(parts[0], **{n: _whole([getattr(x, n) for x in parts]) for n in names})

    def detach(self) -> Self:
        """Return the same record without gradients."""
        return self._map(Tensor.detach)

    def _map(self, function: Callable[[Tensor], Tensor], but: Collection[str] = ()) -> Self:
        present = {n: x for n, x in vars(self).items() if x is not None and n not in but}
        return replace(self, **{n: function(x) for n, x in present.items()})


def _whole(tensors: Sequence[Tensor]) -> Tensor:
    """Return the rows of all tensors, their last dimension padded on the right with 0 or False."""
    if tensors[0].dim() > 1:
        width = max(x.shape[-1] for x in tensors)
        tensors = [F.pad(x, (0, width - x.shape[-1])) for x in tensors]
    return torch.cat([*tensors])


@dataclass(frozen=True, kw_only=True)
class Demonstrations(Record):
    """Prompts with the response to imitate, right-padded."""

    ON_CPU: ClassVar[tuple[str, ...]] = ("mask", "target_mask")

    tokens: Int[Tensor, "B S"]
    """Prompt then response; any id on padding."""
    mask: Bool[Tensor, "B S"]
    """True on prompt and response; on the CPU."""
    target_mask: Bool[Tensor, "B S"]
    """True on the tokens to be predicted: the response with its end token, and with
    data.train_on=all what the assistant wrote in the prompt; on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Labels(Demonstrations):
    """Prompts with a response each that is labelled good or bad."""

    ON_CPU = (*Demonstrations.ON_CPU, "label", "other_target_mask")

    label: Bool[Tensor, " B"]
    """True where the response is good; on the CPU."""
    other_tokens: Int[Tensor, "B R"]
    """The same prompts, each with the response of another row, right-padded."""
    other_target_mask: Bool[Tensor, "B R"]
    """True on those responses; on the CPU."""
    kl: Float[Tensor, " B"] | None = None
    """KL of the policy to the reference that the whole batch estimates, nats; None counts as 0."""


@dataclass(frozen=True, kw_only=True)
class Preferences(Record):
    """Pairs of responses to one prompt; row i of `chosen` was preferred to row i of `rejected`."""

    ON_CPU = ("chosen_mask", "rejected_mask", "prompt_tokens")

    chosen: Int[Tensor, "B S"]
    """Prompt then preferred response, right-padded."""
    chosen_mask: Bool[Tensor, "B S"]
    """True on prompt and response; on the CPU."""
    rejected: Int[Tensor, "B R"]
    """Prompt then the other response, right-padded."""
    rejected_mask: Bool[Tensor, "B R"]
    """True on prompt and response; on the CPU."""
    prompt_tokens: Int[Tensor, " B"]
    """Number of tokens of the prompt, with which both sides begin; on the CPU."""
    margin: Float[Tensor, " B"]
    """Margin of the preferred response in the data; 0 where the data have none."""
    draws: Float[Tensor, "B H"] | None = None
    """Number of times that each head of a reward model learns from the pair; None is once."""

    def stacked(self) -> tuple[Int[Tensor, "2B W"], Bool[Tensor, "2B W"]]:
        """Return tokens and mask of both sides as one batch, the chosen rows first."""
        tokens = _whole([self.chosen, self.rejected])
        return tokens, _whole([self.chosen_mask, self.rejected_mask])


@dataclass(frozen=True, kw_only=True)
class Prompts(Record):
    """Prompts to respond to, left-padded so that every response starts in the same column."""

    tokens: Int[Tensor, "B P"]
    mask: Bool[Tensor, "B P"]
    index: Int[Tensor, " B"]
    """Row of the prompt in its data set, to find its text and other columns again."""


@dataclass(frozen=True, kw_only=True)
class Responses(Record):
    """Prompts with a response each."""

    tokens: Int[Tensor, "B P+T"]
    """Left-padded prompt, then right-padded response; any id on padding."""
    mask: Bool[Tensor, "B P+T"]
    """True on prompt and response tokens."""
    response_mask: Bool[Tensor, "B T"]
    """True on response tokens, the end token included."""
    ended: Bool[Tensor, " B"]
    """True where the response reached an end token or a stop string before its maximum length."""
    index: Int[Tensor, " B"]
    """Row of the prompt in its data set."""

    @property
    def responses(self) -> Int[Tensor, "B T"]:
        """Response tokens; any id on padding."""
        return self.tokens[:, -self.response_mask.shape[1] :]

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the records of all parts as one; shorter prompts are padded on the left too."""
        widths = [one.mask.shape[1] - one.response_mask.shape[1] for one in parts]
        found = []
        for one, width in zip(parts, widths, strict=True):
            left = (max(widths) - width, 0)
            found.append(replace(one, tokens=F.pad(one.tokens, left), mask=F.pad(one.mask, left)))
        return super().joined(found)


@dataclass(frozen=True, kw_only=True)
class SampledResponses(Responses):
    """Responses as a sampler returns them."""

    logprobs: Float[Tensor, "B T"] | None
    """Log-probability of each response token under the distribution that it was drawn from, nats;
    0 on padding. None where the sampler does not know it."""
    values: Float[Tensor, "B T"] | None
    """V(s_t) of a critic that the sampler evaluated too; 0 on padding. None without one."""


@dataclass(frozen=True, kw_only=True)
class Rollout(SampledResponses):
    """Sampled responses with the predictions of the policy and the critic for them."""

    logprobs: Float[Tensor, "B T"]
    """Log-probability of each response token under the policy at sampling, nats; 0 on padding."""
    values: Float[Tensor, "B T"]
    """V(s_t) of the critic before token t is chosen; 0 on padding and without a critic."""
    sampler_logprobs: Float[Tensor, "B T"] | None = None
    """Log-probability of each response token of a sampler that is not exact, nats; 0 on padding.
    None where it returns none, or is exact."""


@dataclass(frozen=True, kw_only=True)
class DecodedResponses:
    """Responses as tokens and as text, with the rows of the data that hold their prompts."""

    rollout: SampledResponses
    rows: Sequence[Mapping[str, Any]]
    """B rows of the data. "prompt" is the prompt as text, "messages" its turns, each a dictionary
    {"role", "content"}; the other columns are unchanged from the data."""
    responses: Sequence[str]
    """B texts, without end token or stop string."""
    decode: Callable[[Sequence[int]], str]
    """Function that returns the text of the first tokens of a response."""

    def __len__(self) -> int:
        return len(self.responses)

    def select(self, rows: Int[Tensor, " M"]) -> DecodedResponses:
        """Return the responses `rows`."""
        numbers = rows.tolist()
        return DecodedResponses(
            rollout=self.rollout.select(rows),
            rows=[self.rows[i] for i in numbers],
            responses=[self.responses[i] for i in numbers],
            decode=self.decode,
        )

    @cached_property
    def tokens(self) -> list[list[int]]:
        """Return the tokens of each response, its end token included."""
        return real_tokens(self.rollout.responses, self.rollout.response_mask)

    def token_at(self, row: int, end: int) -> int:
        """Return the number of the token of response `row` that ends its first `end` characters.

        It is the first token with which they are whole, and the last of the response, its end token
        included, where `end` is the length of the text.
        """
        tokens, text = self.tokens[row], self.responses[row]
        if end == len(text):
            return len(tokens) - 1

        def whole(count: int) -> int:
            shown = self.decode(tokens[:count])
            while not text.startswith(shown):  # a character of which some bytes are missing
                shown = shown[:-1]
            return len(shown)

        return bisect_left(range(1, len(tokens)), end, key=whole)


@dataclass(frozen=True, kw_only=True)
class Scores(Record):
    """Scores of a rollout by the frozen models."""

    component_scores: Float[Tensor, "B K"]
    """Number that each component of the reward gives the whole response."""
    score: Float[Tensor, " B"]
    """Weighted sum of the components."""
    ref_logprobs: Float[Tensor, "B T"]
    """Log-probability of each response token under the reference, nats; 0 on padding."""
    token_scores: Float[Tensor, "B K T"] | None = None
    """Part of each component's number that belongs to a response token, 0 where none does; what
    they leave of the number belongs to the last token. None counts as 0."""
    vocabulary_kl: Float[Tensor, "B T"] | None = None
    """KL of policy to reference over the whole vocabulary, nats a token; None unless
    ppo.kl_estimator=full."""


@dataclass(frozen=True, kw_only=True)
class Experience(Responses):
    """A rollout with everything PPO's update needs; a pure function of (Rollout, Scores)."""

    ON_CPU = ("counts",)

    old_logprobs: Float[Tensor, "B T"]
    """Log-probability of each response token under the policy at sampling, nats; 0 on padding."""
    old_values: Float[Tensor, "B T"]
    """V(s_t) of the critic at sampling; 0 on padding."""
    ref_logprobs: Float[Tensor, "B T"]
    """Log-probability of each response token under the reference, nats; 0 on padding."""
    kl: Float[Tensor, "B T"]
    """KL of the policy at sampling to the reference, always by estimator k1, nats a token; 0 on
    padding."""
    rewards: Float[Tensor, "B T"]
    """Reward of each token: its part of the shaped score, of which the last token has what the
    others leave, minus the KL penalty; 0 on padding."""
    advantages: Float[Tensor, "B T"]
    """Advantage of each response token, whitened over the batch where ppo.whiten_advantages=batch;
    0 on padding."""
    returns: Float[Tensor, "B T"]
    """Targets of the value head, from unwhitened advantages; 0 on padding."""
    component_scores: Float[Tensor, "B K"]
    """Number that each component of the reward gave the whole response."""
    score: Float[Tensor, " B"]
    """Weighted sum of the components, before any shaping."""
    sampler_logprobs: Float[Tensor, "B T"] | None = None
    """As in `Rollout`."""
    counts: Int[Tensor, "B 2"] | None = None
    """Number of tokens and of response tokens of each row; None until `minibatches`."""


def row_lengths(batch: Responses) -> Int[Tensor, "B 2"]:
    """Return the number of tokens and of response tokens of each row, on the CPU where known."""
    if isinstance(batch, Experience) and batch.counts is not None:
        return batch.counts
    return torch.stack([batch.mask.sum(dim=1), batch.response_mask.sum(dim=1)], dim=1)


def known_mask(batch: Responses) -> Bool[Tensor, "B T"]:
    """Return the mask of the response tokens, on the CPU where the lengths are known."""
    if not isinstance(batch, Experience) or batch.counts is None:
        return batch.response_mask
    return torch.arange(batch.response_mask.shape[1]) < batch.counts[:, 1:]


def all_alike(score: Float[Tensor, " B"], group_size: int) -> Bool[Tensor, " G"]:
    """Return which groups, `group_size` responses in a row, have the same score throughout."""
    groups = score.view(-1, group_size)
    return (groups == groups[:, :1]).all(dim=1)


def resample_alike(
    rollout: Rollout,
    scores: Scores,
    group_size: int,
    rounds: int,
    draw: Callable[[int, int], tuple[Rollout, Scores]],
) -> tuple[Rollout, Scores, tuple[Rollout, ...]]:
    """Replace groups whose responses all have the same score by groups of further prompts.

    A group that is alike has advantage 0 and no gradient, so that without it more of the batch is
    learned from. Each round replaces all such groups, at their places, until there is none. Groups
    that are alike after the last round stay. 0 rounds replace none.

    draw: function from the number of prompts and that of the round, from 0, to responses and their
        scores; none of its groups needs to differ.
    Returns: the batch and its scores, and the responses that were replaced in each round.
    Source: Yu et al. 2025, section 3.2, https://arxiv.org/abs/2503.14476
    Departs: there all groups of a further batch are sampled, and as many rounds as are needed.
    """
    replaced = []
    for number in range(rounds):
        is_alike = all_alike(scores.score, group_size).cpu()
        if not is_alike.any():
            break
        more, more_scores = draw(int(is_alike.sum()), number)
        rows, places = torch.arange(len(rollout)), is_alike.repeat_interleave(group_size)
        replaced.append(rollout.select(rows[places]))
        rows[places] = len(rollout) + torch.arange(len(more))
        rollout = Rollout.joined([rollout, more]).select(rows)
        scores = Scores.joined([scores, more_scores]).select(rows)
    return rollout, scores, tuple(replaced)


@dataclass(frozen=True, kw_only=True)
class PPOTerms:
    """Loss and statistics of PPO on a minibatch, or a micro-batch's shares of them; 0-d.

    loss, policy_loss, kl_loss and value_loss weigh each token by ppo.loss_reduction; the other
    fields are means over the minibatch's tokens.
    """

    loss: Tensor
    """Minimised loss. Where ppo.loss_reduction=token_mean or ppo.ent_coef=0, it is policy_loss +
    kl_coef * kl_loss + vf_coef * value_loss - ent_coef * entropy + ptx_coef * ptx_loss; else the
    entropy in it weighs each token as the losses do, and differs from the field `entropy`. A
    subclass of `PPOModule` may add terms."""
    policy_loss: Tensor
    """Loss of the policy that ppo.policy_loss names; lower is better."""
    kl_loss: Tensor
    """KL to the reference that ppo.kl_in=loss adds, nats a token; 0 where it is in the reward."""
    value_loss: Tensor
    """Clipped squared error, with the factor 1/2; 0 without a critic."""
    ptx_loss: Tensor
    """Negative log-likelihood of a batch of demonstrations, mean over its target tokens, nats; 0
    where ppo.ptx_coef=0 and during ppo.critic_warmup."""
    entropy: Tensor
    """Entropy of the current policy, nats a token."""
    approx_kl: Tensor
    """KL of the policy at sampling to the current policy, estimator k3, nats a token."""
    clip_fraction: Tensor
    """Share of tokens that are `PolicyLosses.clipped`: whose ratio is outside the clip range."""
    value_clip_fraction: Tensor
    """Share of tokens whose value is outside old_value +- clip_range_vf."""
    ratio_mean: Tensor
    """Mean over tokens of the ratio: current probability divided by that at sampling."""
    ratio_max: Tensor
    """Largest ratio of any token."""

    @classmethod
    def of(cls, loss: Tensor, **measured: Tensor) -> Self:
        """Return the terms of a loss; fields that were not measured are NaN, and no metrics."""
        nothing = torch.full_like(loss.detach(), math.nan)
        return cls(**{f.name: nothing for f in fields(cls)} | measured | {"loss": loss})


@dataclass(frozen=True, kw_only=True)
class UpdateStats(PPOTerms):
    """Statistics of one minibatch of PPO and of its optimizer step, 0-d."""

    grad_norm: Tensor
    """Global norm of the gradient before clipping."""
    skipped: Tensor
    """1 where ppo.max_ratio prevented the optimizer step, else 0."""
    stopped: Tensor
    """1 where ppo.target_kl prevented the step and ended the iteration's epochs, else 0."""
    nonfinite: Tensor
    """1 where the step was not made because the loss or the gradient is not finite, else 0."""
