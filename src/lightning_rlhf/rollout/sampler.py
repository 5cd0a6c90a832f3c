"""The protocol of samplers, which draw responses to prompts, transformers' generate(), and checks.

The checks are those of the results of a user's sampler.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, Protocol, Self

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase
from transformers.generation import StopStringCriteria

from lightning_rlhf.core.errors import LogitsError, RLHFError, SamplerError
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.io.user_code import FAULTS
from lightning_rlhf.models.roles import Roles

Share = Int[Tensor, " M"]
"""Numbers of the prompts of a batch that a sampler responds to, ascending."""
GREEDY = 1e-6
"""Temperature at which a token whose logit is largest by more than 2e-5 has probability 1."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of the distribution and the end of responses."""

    max_response_tokens: int
    """Largest number of tokens of a response, the end token included."""
    temperature: float
    """Divisor of the logits: tokens are drawn from softmax(logits / temperature)."""
    end_token_ids: Sequence[int]
    """Ids of the tokens that end a response."""
    stop_strings: Sequence[str] = ()
    """Texts that end a response as an end token does, and stay in it."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Tokenizer of the policy; None where no text is read."""

    @classmethod
    def of(cls, config: Any, chat: Any) -> Self:
        """Return the parameters of a stage; config: its section; chat: its `ChatFormat`."""
        return cls(
            max_response_tokens=config.max_response_tokens,
            temperature=config.temperature,
            end_token_ids=chat.end_token_ids,
            stop_strings=config.stop_strings,
            tokenizer=chat.tokenizer,
        )

    @cached_property
    def stop(self) -> StopStringCriteria | None:
        """Criterion that reads response tokens [B, T] and returns which rows end with a stop
        string; None without any."""
        if not self.stop_strings:
            return None
        return StopStringCriteria(self.tokenizer, [*self.stop_strings])


def response_numbers(rows: Int[Tensor, " M"], samples_per_prompt: int) -> Int[Tensor, " R"]:
    """Return the numbers, among the responses of a batch, of those to the prompts `rows` of it."""
    first = rows[:, None] * samples_per_prompt
    return (first + torch.arange(samples_per_prompt, device=rows.device)).flatten()


def draw_tokens(
    logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Draw tokens by inverse-CDF sampling: the first with cumulative probability above `uniform`.

    This has two levels: the vocabulary is summed in about sqrt(V) blocks, and only the block that
    contains the number is summed token by token. `uniform` in [0, 1) is scaled down slightly, so
    that rounding of the sums can never select a token of probability 0.

    logits: fp32, at temperature 1.
    Returns: the tokens, and their log-probabilities in nats; NaN for a row without a distribution.
    """
    size = logits.shape[1]
    block = math.isqrt(size - 1) + 1
    probability = torch.softmax(logits, -1)
    whole = size // block
    masses = probability[:, : whole * block].unflatten(1, (whole, block)).sum(-1)
    masses = torch.cat([masses, probability[:, whole * block :].sum(-1, keepdim=True)], dim=1)
    ends = cumulative(masses)
    target = uniform[:, None] * (1 - 1e-6) * ends[:, -1:]
    chosen = torch.searchsorted(ends, target, right=True).clamp(max=whole)
    before = F.pad(ends, (1, 0)).gather(1, chosen)
    places = chosen * block + torch.arange(block, device=logits.device)
    inside = cumulative(probability.gather(1, places.clamp(max=size - 1)))
    rest = (target - before).clamp(min=0).minimum(inside[:, -1:] * (1 - 1e-6))
    token = chosen * block + torch.searchsorted(inside, rest, right=True)
    token = token.clamp(max=size - 1)
    # The sum of blocks is nearer to 1 than the sum by which softmax divided.
    logprob = (probability.gather(1, token) / masses.sum(-1, keepdim=True)).log()
    return token.squeeze(1), logprob.squeeze(1)


def cumulative(mass: Float[Tensor, "B n"]) -> Float[Tensor, "B n"]:
    """Return the cumulative sum, which is constant where there is no mass, and never falls.

    A GPU's cumulative sum may fall by a rounding, and may rise where there is no mass.
    """
    return torch.where(mass > 0, mass.cumsum(-1), 0).cummax(-1).values


class Sampler(Protocol):
    """Draws responses to prompts from the current policy.

    `native`, `hf` and `vllm` are three; `ppo.rollout=path/to/file.py:Class` or
    `package.module:Class` takes one from outside the package. A run builds it once, as
    `Class(roles, params)`: `roles` are the models that are trained, `params` are `SamplingParams`.
    `annotate` then adds what the sampler does not know, so that a minimal one returns tokens and
    which of them ended.
    """

    is_exact: bool
    """True if the returned log-probabilities and values are computed with the weights and at the
    precision of the training. False (a server's) has the training model compute them instead."""

    def sync(self, version: int) -> None:
        """Take over the weights of the active role, where they are held elsewhere.

        Called in all processes before they sample; a sampler of the user's own may lack it.

        version: number of changes of the weights so far, optimizer steps and swaps with their
            average: weights of the same number are the same.
        """

    def sample(
        self, prompts: Prompts, samples_per_prompt: int, generator: torch.Generator, share: Share
    ) -> SampledResponses:
        """Return responses to some of the prompts, drawn from softmax(logits / temperature).

        Args:
            prompts: left-padded prompts of the whole batch, on the device of the models.
            samples_per_prompt: number of responses to each prompt.
            generator: source of everything random, on the CPU, in the same state for every share of
                a batch. Numbers drawn for all responses of the batch, of which those of `share`
                are used, make a response independent of the number of processes.
            share: numbers of the prompts to respond to, ascending: not all of them where several
                processes divide the batch, or where not all fit into memory at once.

        Returns: `samples_per_prompt` responses to the first prompt of `share`, then those to the
            second, …, right-padded to the longest of all.

        Raises: LogitsError where there is no distribution to draw from.
        """
        ...


def synchronise(sampler: Any, version: int) -> None:
    """Let a sampler take over the weights, as `Sampler.sync`; one that lacks it reads them."""
    if hasattr(sampler, "sync"):
        sampler.sync(version)


@dataclass(eq=False)
class BatchSampler:
    """Base class of the package's samplers, which draw all random numbers of a batch beforehand.

    A response then depends on neither the lengths of the others nor the division of the batch.
    """

    roles: Roles
    params: SamplingParams
    is_exact = True

    def sync(self, version: int) -> None:
        """Do nothing: the weights that are trained are sampled from."""

    def draw(self, responses: int, generator: torch.Generator) -> Float[Tensor, "B T"]:
        """Return the random numbers of a whole batch of so many responses, on the CPU.

        They are one for each response and position.
        """
        return torch.rand(responses, self.params.max_response_tokens, generator=generator)


class HFSampler(BatchSampler):
    """Samples from the active role by transformers' generate(): the tokens of `NativeSampler`."""

    @torch.no_grad()
    def sample(
        self, prompts: Prompts, samples_per_prompt: int, generator: torch.Generator, share: Share
    ) -> SampledResponses:
        """Return responses without log-probabilities and values, as `Sampler.sample`."""
        params, model = self.params, self.roles.causal_lm
        numbers = response_numbers(share, samples_per_prompt).cpu()
        uniforms = self.draw(len(prompts) * samples_per_prompt, generator)[numbers]
        prompts = prompts.select(share).repeat(samples_per_prompt)
        width = prompts.tokens.shape[1]
        drawn = _Drawn(uniforms.to(prompts.tokens.device), width, params.temperature)
        stops: list[Any] = []
        if (stop := params.stop) is not None:  # which is given the response alone
            stops.append(lambda tokens, scores, **_: stop(tokens[:, width:], scores))
        models_own = model.generation_config
        # The model's own settings would fill in those that are not set here.
        model.generation_config = transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=params.max_response_tokens,
            eos_token_id=list(params.end_token_ids),
            pad_token_id=params.end_token_ids[0],
        )
        try:
            with self.roles.whole():
                tokens = model.generate(
                    input_ids=prompts.tokens,
                    attention_mask=prompts.mask.long(),
                    logits_processor=transformers.LogitsProcessorList([drawn]),
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


@dataclass(eq=False)
class _Drawn(transformers.LogitsProcessor):
    """Leaves the token that `draw_tokens` draws as the only one that generate() can choose."""

    uniforms: Float[Tensor, "B T"]
    width: int
    """Number of prompt tokens."""
    temperature: float

    def __call__(self, input_ids: Tensor, scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        logits = scores.float() / self.temperature
        tokens, logprobs = draw_tokens(logits, self.uniforms[:, input_ids.shape[1] - self.width])
        if not logprobs.isfinite().all():
            raise LogitsError
        return torch.full_like(logits, -torch.inf).scatter(1, tokens[:, None], 0)


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

    def sync(self, version: int) -> None:
        """Let the user's sampler take over the weights. Raises SamplerError where it fails."""
        with self.named("sync"):
            synchronise(self.sampler, version)

    def sample(
        self, prompts: Prompts, samples_per_prompt: int, generator: torch.Generator, share: Share
    ) -> SampledResponses:
        """Return the responses of the user's sampler, unchanged.

        Raises: SamplerError unless they are `samples_per_prompt` responses to each prompt, as
            `SampledResponses` describes, and where the sampler raises an exception. Errors of the
            package and torch.OutOfMemoryError are raised as they are.
        """
        with self.named("sample"):
            found = self.sampler.sample(prompts, samples_per_prompt, generator, share)
        self.check(found, prompts.select(share).repeat(samples_per_prompt))
        return found

    @contextmanager
    def named(self, method: str) -> Iterator[None]:
        """Raise SamplerError that names a method of the user's sampler where the block fails."""
        try:
            yield
        except (RLHFError, torch.OutOfMemoryError):
            raise
        except FAULTS as error:
            shown = f"raised {' '.join(f'{type(error).__name__}: {error}'.split())}"
            raise SamplerError(f"{self.key} is {self.name!r}, whose {method}() {shown}") from error

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
        for name, x in (("logprobs", found.logprobs), ("values", found.values)):
            if x is not None:
                wrong = ~x.isfinite() & mask
                rules.append((wrong, f"{name} that are not finite", "finite numbers"))
        if found.logprobs is not None:
            wrong = (found.logprobs > ROUNDING) & mask
            rules.append((wrong, "logprobs above 0", "logarithms of probabilities, at most 0"))
        for wrong, what, allowed in rules:
            if wrong.any():
                row = int(wrong.view(rows, -1).any(dim=1).int().argmax())
                self.refuse(f"{what} for response {row}", allowed)
