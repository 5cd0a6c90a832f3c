"""The protocol of samplers, which draw responses to prompts, transformers' generate(), and checks.

The checks are those of the results of a user's sampler.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from jaxtyping import Bool, Float, Int
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
            generator: source of everything random, on the CPU: the same state gives the same
                responses.

        Returns: `samples_per_prompt` responses to the first prompt, then those to the second, …,
            right-padded to the longest of all.

        Raises: LogitsError where there is no distribution to draw from.
        """
        ...


@dataclass(eq=False)
class HFSampler:
    """Samples from the active role; the same distribution as `NativeSampler`, but slower.

    All draws of a batch come from one generator, so that a response depends on the lengths of the
    others.
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
                tokens = model.generate(
                    input_ids=prompts.tokens,
                    attention_mask=prompts.mask.long(),
                    logits_processor=transformers.LogitsProcessorList([_Finite()]),
                    stopping_criteria=transformers.StoppingCriteriaList(stops),
                )
            finally:
                model.generation_config = models_own
        ends = _ends(tokens[:, width:], params)
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


def _ends(responses: Int[Tensor, "B T"], params: SamplingParams) -> Bool[Tensor, "B T"]:
    """Return True where a token ends its response, by its id or by the criterion `stop`."""
    ends = torch.isin(responses, torch.tensor(list(params.end_token_ids), device=responses.device))
    if params.stop is not None:
        lengths = range(1, responses.shape[1] + 1)
        ends |= torch.stack([params.stop(responses[:, :n], None) for n in lengths], dim=1)
    return ends


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
            got = type(x).__name__
            if isinstance(x, Tensor):
                got = f"{x.dtype} {[*x.shape]} on {x.device}"
                is_kind = x.is_floating_point() if dtype is None else x.dtype == dtype
                if is_kind and [*x.shape] == shape and x.device == device:
                    continue
            kind = dtype or "a floating-point type"
            yield f"{field} of {got}", f"{kind} {shape} on {device}, for {width} prompt tokens"
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
