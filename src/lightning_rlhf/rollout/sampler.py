"""The protocol of samplers, which draw responses to prompts, and checks of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import StoppingCriteria

from lightning_rlhf.core.errors import RLHFError, SamplerError
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.io.user_code import FAULTS


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


ROUNDING = 1e-3
"""Nats by which rounding may bring the log-probability of a sure token above 0."""
KEY = "ppo.rollout"
"""Configuration key that names the sampler of stage=ppo."""


class CheckedSampler:
    """A user's sampler that raises SamplerError where it fails or breaks the protocol."""

    def __init__(
        self,
        sampler: Sampler,
        name: str,
        *,
        max_response_tokens: int,
        vocab_size: int,
        key: str = KEY,
    ) -> None:
        """Wrap a sampler; name: value of the configuration key `key`, for the errors.

        vocab_size: number of token ids of the model.
        """
        self.sampler, self.is_exact = sampler, bool(sampler.is_exact)
        self.name, self.key = name, key
        self.max_response_tokens, self.vocab_size = max_response_tokens, vocab_size

    def sample(
        self, prompts: Prompts, samples_per_prompt: int, generator: torch.Generator
    ) -> SampledResponses:
        """Return the responses of the user's sampler, unchanged.

        Raises: SamplerError unless they are `samples_per_prompt` responses to each prompt, as
            `SampledResponses` describes, and where the sampler raises an exception. Errors of the
            package and torch.OutOfMemoryError are raised as they are.
        """
        try:
            found = self.sampler.sample(prompts, samples_per_prompt, generator)
        except (RLHFError, torch.OutOfMemoryError):
            raise
        except FAULTS as error:
            shown = " ".join(f"{type(error).__name__}: {error}".split())
            raise SamplerError(f"{self.key} is {self.name!r}, whose sample() raised {shown}") from (
                error
            )
        prompts = prompts.repeat(samples_per_prompt)
        if (fault := form_fault(found, prompts) or self.row_fault(found, prompts)) is not None:
            raise SamplerError(
                f"{self.key} is {self.name!r}, whose sample() returned {fault[0]}; allowed: "
                f"{fault[1]}"
            )
        return found

    def row_fault(self, found: SampledResponses, prompts: Prompts) -> tuple[str, str] | None:
        """Return what is wrong with a response, and what is allowed; None without a fault.

        prompts: prompt of each response, in the order of the responses.
        """
        mask, width = found.response_mask, prompts.tokens.shape[1]
        lengths, most = mask.sum(dim=1), self.max_response_tokens
        limit = f"1 to {self.key.rpartition('.')[0]}.max_response_tokens={most}"
        outside = (found.tokens < 0) | (found.tokens >= self.vocab_size)
        other_prompt = (found.tokens[:, :width] != prompts.tokens) & prompts.mask
        other_mask = found.mask != torch.cat([prompts.mask, mask], dim=1)
        rules = [
            ((lengths < 1) | (lengths > most), "another number of tokens", f"{limit}, the end "
             "token included"),
            ((mask[:, 1:] > mask[:, :-1]).any(dim=1), "a response_mask with a gap",
             "True from its first column to the last token of the response, then False"),
            (other_mask.any(dim=1), "another mask", "the prompt's mask, then response_mask"),
            (other_prompt.any(dim=1), "tokens of another prompt",
             "the prompt's, then the response's"),
            (found.index != prompts.index, "another index", "that of its prompt"),
            (outside.any(dim=1), "a token id outside of the vocabulary",
             f"0 to {self.vocab_size - 1}, on padding too"),
        ]  # fmt: skip
        for field in ("logprobs", "values"):
            if (numbers := getattr(found, field)) is not None:
                wrong = (~numbers.isfinite() & mask).any(dim=1)
                rules.append((wrong, f"{field} that are not finite", "finite numbers"))
        if found.logprobs is not None:
            wrong = ((found.logprobs > ROUNDING) & mask).any(dim=1)
            rules.append((wrong, "logprobs above 0", "logarithms of probabilities, at most 0"))
        for wrong, what, allowed in rules:
            if wrong.any():
                return f"{what} for response {int(wrong.int().argmax())}", allowed
        return None


def form_fault(found: Any, prompts: Prompts) -> tuple[str, str] | None:
    """Return the field that is no tensor of its shape, type and device, and what is allowed."""
    if not isinstance(found, SampledResponses):
        return f"an object of type {type(found).__name__}", "SampledResponses"
    rows, width = prompts.tokens.shape
    mask: Any = found.response_mask
    columns = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else 0
    for field, dtype, shape in (
        ("response_mask", torch.bool, [rows, columns]),
        ("tokens", torch.int64, [rows, width + columns]),
        ("mask", torch.bool, [rows, width + columns]),
        ("ended", torch.bool, [rows]),
        ("index", torch.int64, [rows]),
        ("logprobs", None, [rows, columns]),
        ("values", None, [rows, columns]),
    ):
        x = getattr(found, field)
        if x is None and dtype is None:
            continue
        kind = dtype or "a floating-point type"
        allowed = f"{kind} {shape} on {prompts.tokens.device}, for {width} prompt tokens"
        if not isinstance(x, Tensor):
            return f"{field} of type {type(x).__name__}", allowed
        is_kind = x.dtype == dtype or (dtype is None and x.is_floating_point())
        if not is_kind or [*x.shape] != shape or x.device != prompts.tokens.device:
            return f"{field} of {x.dtype} {[*x.shape]} on {x.device}", allowed
    return None
