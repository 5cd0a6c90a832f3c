"""The protocol of samplers, which draw responses to prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import StoppingCriteria

from lightning_rlhf.core.types import Prompts, SampledResponses


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of the distribution and the end of responses."""

    max_response_tokens: int
    """Largest number of tokens of a response, the end token included."""
    temperature: float
    """Divisor of the logits: tokens are drawn from softmax(logits / temperature)."""
    end_token_ids: Sequence[int]
    """Ids of the tokens that end a response."""
    stop: StoppingCriteria | None = None
    """Criterion that is given the response tokens so far, [B, T], and returns which responses end
    there; None for no rule."""


@dataclass(frozen=True)
class Share:
    """Prompts of a batch that are sampled now, on this device; the others are elsewhere or later.

    The random numbers of a response are those that it has when the whole batch is sampled at once.
    """

    rows: Int[Tensor, " M"]
    """Numbers of the prompts in the batch."""
    total: int
    """Number of prompts in the batch."""

    def responses(self, samples_per_prompt: int) -> Int[Tensor, " R"]:
        """Return the numbers of the responses to these prompts in the batch of responses."""
        first = self.rows[:, None] * samples_per_prompt
        return (first + torch.arange(samples_per_prompt, device=self.rows.device)).flatten()


class Sampler(Protocol):
    """Draws responses to prompts from the current policy.

    `native` and `hf` are two; `ppo.rollout=path/to/file.py:Class` or `package.module:Class` takes
    one from outside the package. A run builds it once, as `Class(roles, params)`: `roles` is a
    `Roles`, the models that are trained, for a sampler that computes with them or sends their
    weights to a server; `params` are `SamplingParams`. `annotate` then adds what the training needs
    and the sampler does not know, so that a minimal sampler returns tokens and which of them ended.
    """

    is_exact: bool
    """True if the returned log-probabilities and values are computed with the weights and at the
    precision of the training, and so are used unchanged. False where they may differ a little, as
    those of a server do: the training model's are computed instead."""

    def sample(
        self, prompts: Prompts, samples_per_prompt: int, generator: torch.Generator
    ) -> SampledResponses:
        """Return responses to each prompt, drawn from softmax(logits / temperature).

        Args:
            prompts: left-padded prompts, on the device of the models. They are a part of a batch
                where several processes divide it, or where the memory runs out.
            samples_per_prompt: number of responses to each prompt.
            generator: source of everything random, on the CPU: the same state gives the same
                responses.

        Returns: `samples_per_prompt` responses to the first prompt, then those to the second, …,
            right-padded to the longest of all. Those of a sampler from outside the package are
            checked, with SamplerError for what does not fit (`rollout.checked_sampler`).

        Raises: LogitsError where there is no distribution to draw from.
        """
        ...
