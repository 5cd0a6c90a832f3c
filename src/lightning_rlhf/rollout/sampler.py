"""The protocol of samplers, which draw responses to prompts, and checks of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


Require = Callable[[bool, str, str], None]
"""(holds, what was returned, what is allowed) -> None; raises SamplerError where it does not."""
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

        Raises: SamplerError where `is_exact` is no bool.
        """
        self.sampler = sampler
        self.is_exact = sampler.is_exact
        if not isinstance(self.is_exact, bool):
            raise SamplerError(
                f"{key} is {name!r}, whose is_exact is {self.is_exact!r}; allowed: True or False"
            )
        self.name = name
        self.key = key
        self.max_response_tokens = max_response_tokens
        self.vocab_size = vocab_size

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
        return checked(
            found,
            prompts.repeat(samples_per_prompt),
            self.name,
            max_response_tokens=self.max_response_tokens,
            vocab_size=self.vocab_size,
            key=self.key,
        )


def checked(
    found: Any,
    prompts: Prompts,
    name: str,
    *,
    max_response_tokens: int,
    vocab_size: int,
    key: str = KEY,
) -> SampledResponses:
    """Return what a user's sampler gave, unless it breaks the protocol.

    Args:
        prompts: prompt of each response, in the order of the responses.
        name: value of the configuration key `key`.
        vocab_size: number of token ids of the model.

    Raises: SamplerError, which names the class, the field, what was found and what is allowed.
    """

    def require(holds: bool, what: str, allowed: str) -> None:
        if not holds:
            raise SamplerError(
                f"{key} is {name!r}, whose sample() returned {what}; allowed: {allowed}"
            )

    require(isinstance(found, SampledResponses), f"an object of type {type(found).__name__}",
            "SampledResponses")  # fmt: skip
    check_tensors(found, prompts, require)
    limit = f"{key.rpartition('.')[0]}.max_response_tokens={max_response_tokens}"
    check_rows(found, prompts, require, max_response_tokens, limit, vocab_size)
    return found


def check_tensors(found: SampledResponses, prompts: Prompts, require: Require) -> None:
    """Require a tensor of the right shape, type and device in each field."""
    rows, width = prompts.tokens.shape
    mask = found.response_mask
    is_grid = isinstance(mask, Tensor) and mask.dim() == 2
    columns: Any = mask.shape[1] if is_grid else "T"
    whole = width + columns if is_grid else f"{width}+T"
    for field, kind, shape in (
        ("response_mask", torch.bool, [rows, columns]),
        ("tokens", torch.int64, [rows, whole]),
        ("mask", torch.bool, [rows, whole]),
        ("ended", torch.bool, [rows]),
        ("index", torch.int64, [rows]),
        ("logprobs", None, [rows, columns]),
        ("values", None, [rows, columns]),
    ):
        tensor = getattr(found, field)
        if tensor is None and kind is None:
            continue
        require(isinstance(tensor, Tensor), f"{field} of type {type(tensor).__name__}", "a tensor")
        require(tensor.layout == torch.strided, f"{field} of {tensor.layout}", "a dense tensor")
        require(not tensor.requires_grad, f"{field} with a gradient", "one made in torch.no_grad()")
        expected = f"[{', '.join(map(str, shape))}], for {rows} responses to {width} prompt tokens"
        require([*tensor.shape] == shape, f"{field} of shape {[*tensor.shape]}", expected)
        fits = tensor.dtype == kind if kind else tensor.is_floating_point()
        require(fits, f"{field} of {tensor.dtype}", str(kind or "a floating-point type"))
        require(tensor.device == prompts.tokens.device, f"{field} on {tensor.device}",
                f"{prompts.tokens.device}, the device of the prompts")  # fmt: skip


def check_rows(
    found: SampledResponses,
    prompts: Prompts,
    require: Require,
    max_response_tokens: int,
    limit: str,
    vocab_size: int,
) -> None:
    """Require responses to the prompts, of allowed lengths, tokens and log-probabilities.

    limit: configuration key of max_response_tokens and its value, for the errors.
    """
    mask, width = found.response_mask, prompts.tokens.shape[1]
    lengths, outside = mask.sum(dim=1), (found.tokens < 0) | (found.tokens >= vocab_size)
    first_outside = found.tokens.gather(1, outside.int().argmax(dim=1, keepdim=True)).squeeze(1)
    other_prompt = (found.tokens[:, :width] != prompts.tokens) & prompts.mask
    other_mask = found.mask != torch.cat([prompts.mask, mask], dim=1)
    for wrong, what, allowed in (
        (lengths == 0, "{length} tokens", "at least one, the end token included"),
        (lengths > max_response_tokens, "{length} tokens",
         f"at most {limit}"),
        ((mask[:, 1:] > mask[:, :-1]).any(dim=1), "a response_mask with a gap",
         "True from its first column to the last token of the response, then False"),
        (other_mask.any(dim=1), "another mask", "the prompt's mask, then response_mask"),
        (other_prompt.any(dim=1), "tokens of another prompt", "the prompt's, then the response's"),
        (found.index != prompts.index, "another index", "that of its prompt"),
        (outside.any(dim=1), "token id {token}", f"0 to {vocab_size - 1}, on padding too"),
        *(
            ((~numbers.isfinite() & mask).any(dim=1), f"{field} that are not finite",
             "finite numbers")
            for field, numbers in (("logprobs", found.logprobs), ("values", found.values))
            if numbers is not None
        ),
        *(
            [(((found.logprobs > ROUNDING) & mask).any(dim=1), "logprobs above 0",
              "logarithms of probabilities, at most 0")]
            if found.logprobs is not None
            else []
        ),
    ):  # fmt: skip
        if wrong.any():
            row = int(wrong.int().argmax())
            shown = what.format(length=int(lengths[row]), token=int(first_outside[row]))
            require(False, f"{shown} for response {row}", allowed)
