"""The protocol of samplers, which draw responses to prompts, and checks of their results."""

from collections.abc import Iterator, Sequence
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
            checked, with SamplerError for what does not fit (`CheckedSampler`).

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
        for what, allowed in self.faults(found, prompts.repeat(samples_per_prompt)):
            raise SamplerError(
                f"{self.key} is {self.name!r}, whose sample() returned {what}; allowed: {allowed}"
            )
        return found

    def faults(self, found: Any, prompts: Prompts) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with the responses, and what is allowed: their form, then their rows.

        prompts: prompt of each response, in the order of the responses.
        """
        if not isinstance(found, SampledResponses):
            yield f"an object of type {type(found).__name__}", "SampledResponses"
            return
        (rows, width), device = prompts.tokens.shape, prompts.tokens.device
        mask: Any = found.response_mask
        columns = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else 0
        each, whole = [rows, columns], [rows, width + columns]
        for field, dtype, shape in (
            ("response_mask", torch.bool, each), ("tokens", torch.int64, whole),
            ("mask", torch.bool, whole), ("ended", torch.bool, [rows]),
            ("index", torch.int64, [rows]), ("logprobs", None, each), ("values", None, each),
        ):  # fmt: skip
            x = getattr(found, field)
            if x is None and dtype is None:
                continue
            allowed = f"{dtype or 'a floating-point type'} {shape} on {device}, for {width} prompt "
            if not isinstance(x, Tensor):
                yield f"{field} of type {type(x).__name__}", f"{allowed}tokens"
                return
            is_kind = x.is_floating_point() if dtype is None else x.dtype == dtype
            if not is_kind or [*x.shape] != shape or x.device != device:
                yield f"{field} of {x.dtype} {[*x.shape]} on {x.device}", f"{allowed}tokens"
                return
        lengths, most = mask.sum(dim=1), self.max_response_tokens
        outside = (found.tokens < 0) | (found.tokens >= self.vocab_size)
        rules = [
            ((lengths < 1) | (lengths > most), "another number of tokens",
             f"1 to {self.key.rpartition('.')[0]}.max_response_tokens={most}, the end token "
             "included"),
            (mask[:, 1:] > mask[:, :-1], "a response_mask with a gap",
             "True from its first column to the last token of the response, then False"),
            (found.mask != torch.cat([prompts.mask, mask], dim=1), "another mask",
             "the prompt's mask, then response_mask"),
            ((found.tokens[:, :width] != prompts.tokens) & prompts.mask,
             "tokens of another prompt", "the prompt's, then the response's"),
            (found.index != prompts.index, "another index", "that of its prompt"),
            (outside, "a token id outside of the vocabulary",
             f"0 to {self.vocab_size - 1}, on padding too"),
        ]  # fmt: skip
        for field in ("logprobs", "values"):
            if (numbers := getattr(found, field)) is not None:
                wrong = ~numbers.isfinite() & mask
                rules.append((wrong, f"{field} that are not finite", "finite numbers"))
        if found.logprobs is not None:
            wrong = (found.logprobs > ROUNDING) & mask
            rules.append((wrong, "logprobs above 0", "logarithms of probabilities, at most 0"))
        for wrong, what, allowed in rules:
            if wrong.any():
                row = int(wrong.view(rows, -1).any(dim=1).int().argmax())
                yield f"{what} for response {row}", allowed
