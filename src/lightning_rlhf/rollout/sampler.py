"""The protocol of samplers, which draw responses to prompts, transformers' generate(), and checks.

The checks are those of the results of a user's sampler.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor
from transformers import StoppingCriteria

from lightning_rlhf.core.errors import LogitsError, RLHFError, SamplerError
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.io.user_code import FAULTS
from lightning_rlhf.models.roles import Roles


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
    """Criterion that reads the response tokens [B, T] and returns which rows end; None for none."""


def response_numbers(rows: Int[Tensor, " M"], samples_per_prompt: int) -> Int[Tensor, " R"]:
    """Return the numbers, among the responses of a batch, of those to the prompts `rows` of it."""
    first = rows[:, None] * samples_per_prompt
    return (first + torch.arange(samples_per_prompt, device=rows.device)).flatten()


class Sampler(Protocol):
    """Draws responses to prompts from the current policy.

    `native` and `hf` are two; `ppo.rollout=path/to/file.py:Class` or `package.module:Class` takes
    one from outside the package. A run builds it once, as `Class(roles, params)`: `roles` are the
    models that are trained, `params` are `SamplingParams`. `annotate` then adds what the sampler
    does not know, so that a minimal one returns tokens and which of them ended.
    """

    is_exact: bool
    """True if the returned log-probabilities and values are computed with the weights and at the
    precision of the training. False (a server's) has the training model compute them instead."""

    def sample(
        self, prompts: Prompts, samples_per_prompt: int, generator: torch.Generator
    ) -> SampledResponses:
        """Return responses to each prompt, drawn from softmax(logits / temperature).

        Args:
            prompts: left-padded prompts, on the device of the models; a part of a batch where
                several processes divide it, or where the memory runs out.
            samples_per_prompt: number of responses to each prompt.
            generator: source of everything random, on the CPU; its state decides the responses.

        Returns: `samples_per_prompt` responses to the first prompt, then those to the second, …,
            right-padded to the longest of all.

        Raises: LogitsError where there is no distribution to draw from.
        """
        ...


@dataclass(eq=False)
class HFSampler:
    """Samples from the active role; the same distribution as `NativeSampler`, but slower.

    A batch has one generator, so that a response depends on the lengths of the others.
    """

    roles: Roles
    params: SamplingParams
    is_exact = True

    def draw(self, responses: int, generator: torch.Generator) -> int:
        """Return the seed of a batch, whatever its number of responses."""
        return int(torch.randint(2**62, (), generator=generator))

    @torch.no_grad()
    def sample(
        self, prompts: Prompts, samples_per_prompt: int, generator: torch.Generator
    ) -> SampledResponses:
        """Return responses without log-probabilities and values, as `Sampler.sample`."""
        roles, params = self.roles, self.params
        prompts = prompts.repeat(samples_per_prompt)
        width = prompts.tokens.shape[1]
        stops: list[Any] = []
        if (stop := params.stop) is not None:  # which is given the response alone
            stops.append(lambda tokens, scores, **_: stop(tokens[:, width:], scores))
        model = roles.causal_lm
        models_own = model.generation_config
        devices = [] if roles.device.type == "cpu" else [roles.device]
        with torch.random.fork_rng(devices, device_type=roles.device.type):
            torch.manual_seed(self.draw(len(prompts), generator))
            # The model's own settings would fill in those that are not set here.
            model.generation_config = transformers.GenerationConfig(
                do_sample=True,
                temperature=float(params.temperature),
                top_k=0,
                top_p=1.0,
                max_new_tokens=params.max_response_tokens,
                eos_token_id=list(params.end_token_ids),
                pad_token_id=params.end_token_ids[0],
            )
            try:
                with roles.whole():
                    tokens = model.generate(
                        input_ids=prompts.tokens,
                        attention_mask=prompts.mask.long(),
                        logits_processor=transformers.LogitsProcessorList([_Finite()]),
                        stopping_criteria=transformers.StoppingCriteriaList(stops),
                    )
            finally:
                model.generation_config = models_own
        responses = tokens[:, width:]
        ends = torch.isin(responses, torch.tensor(list(params.end_token_ids), device=tokens.device))
        if stop is not None:
            lengths = range(1, responses.shape[1] + 1)
            ends |= torch.stack([stop(responses[:, :n], None) for n in lengths], dim=1)
        response_mask = ends.long().cumsum(dim=1) - ends.long() == 0
        return SampledResponses(
            tokens=tokens,
            mask=torch.cat([prompts.mask, response_mask], dim=1),
            response_mask=response_mask,
            ended=ends.any(dim=1),
            logprobs=None,
            values=None,
            index=prompts.index,
        )


class _Finite(transformers.LogitsProcessor):
    """Raises LogitsError for logits from which nothing can be sampled."""

    def __call__(self, input_ids: Tensor, scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        if scores.isnan().any() or scores.isposinf().any():
            raise LogitsError
        return scores


ROUNDING = 1e-3
"""Nats by which rounding may bring the log-probability of a sure token above 0."""
KEY = "ppo.rollout"
"""Configuration key that names the sampler of stage=ppo."""


@dataclass(eq=False)
class CheckedSampler:
    """A user's sampler that raises SamplerError where it fails or breaks the protocol."""

    sampler: Sampler
    name: str
    """Value of the configuration key `key`, for the errors."""
    max_response_tokens: int
    vocab_size: int
    """Number of token ids of the model."""
    key: str = KEY

    def __post_init__(self) -> None:
        self.is_exact = bool(self.sampler.is_exact)

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
            shown = f"raised {' '.join(f'{type(error).__name__}: {error}'.split())}"
            raise SamplerError(f"{self.key} is {self.name!r}, whose sample() {shown}") from error
        self.check(found, prompts.repeat(samples_per_prompt))
        return found

    def refuse(self, what: str, allowed: str) -> NoReturn:
        """Raise SamplerError naming the key, what was returned and what is allowed."""
        where = f"{self.key} is {self.name!r}, whose sample()"
        raise SamplerError(f"{where} returned {what}; allowed: {allowed}")

    def check(self, found: Any, prompts: Prompts) -> None:
        """Raise SamplerError unless the responses have the form that is allowed, and then each row.

        prompts: prompt of each response, in the order of the responses.
        """
        if not isinstance(found, SampledResponses):
            self.refuse(f"an object of type {type(found).__name__}", "SampledResponses")
        (rows, width), device = prompts.tokens.shape, prompts.tokens.device
        mask, index, tokens = found.response_mask, found.index, found.tokens
        columns = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else 0
        forms: dict[str, tuple[Any, list[int]]] = {
            "response_mask": (torch.bool, [rows, columns]),
            "tokens": (torch.int64, [rows, width + columns]),
            "mask": (torch.bool, [rows, width + columns]),
            "ended": (torch.bool, [rows]),
            "index": (torch.int64, [rows]),
            "logprobs": (None, [rows, columns]),
            "values": (None, [rows, columns]),
        }
        for name, (dtype, shape) in forms.items():
            if (x := getattr(found, name)) is None and dtype is None:
                continue
            form = f"{dtype or 'a floating-point type'} {shape} on {device}"
            got = type(x).__name__
            if isinstance(x, Tensor):
                is_kind = x.is_floating_point() if dtype is None else x.dtype == dtype
                if is_kind and [*x.shape] == shape and x.device == device:
                    continue
                got = f"{x.dtype} {[*x.shape]} on {x.device}"
            self.refuse(f"{name} of {got}", f"{form}, for {width} prompt tokens")
        lengths, most = mask.sum(dim=1), self.max_response_tokens
        most_key = f"{self.key.rpartition('.')[0]}.max_response_tokens"
        count = f"1 to {most_key}={most}, the end token included"
        gapless = "True from its first column to the last token of the response, then False"
        foreign = (tokens[:, :width] != prompts.tokens) & prompts.mask
        unknown, ids = (tokens < 0) | (tokens >= self.vocab_size), f"0 to {self.vocab_size - 1}"
        whole = torch.cat([prompts.mask, mask], dim=1)
        rules = [
            ((lengths < 1) | (lengths > most), "another number of tokens", count),
            (mask[:, 1:] > mask[:, :-1], "a response_mask with a gap", gapless),
            (found.mask != whole, "another mask", "the prompt's mask, then response_mask"),
            (foreign, "tokens of another prompt", "the prompt's, then the response's"),
            (index != prompts.index, "another index", "that of its prompt"),
            (unknown, "a token id outside of the vocabulary", f"{ids}, on padding too"),
        ]
        for name in ("logprobs", "values"):
            if (x := getattr(found, name)) is not None:
                rules.append(
                    (~x.isfinite() & mask, f"{name} that are not finite", "finite numbers")
                )
        if found.logprobs is not None:
            wrong = (found.logprobs > ROUNDING) & mask
            rules.append((wrong, "logprobs above 0", "logarithms of probabilities, at most 0"))
        for wrong, what, allowed in rules:
            if wrong.any():
                row = int(wrong.view(rows, -1).any(dim=1).int().argmax())
                self.refuse(f"{what} for response {row}", allowed)
