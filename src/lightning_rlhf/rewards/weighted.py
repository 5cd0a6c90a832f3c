"""The reward: a weighted sum of components, and the components that a reward model computes."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_rlhf.core import config, masking, memory, records, shaping
from lightning_rlhf.core.errors import RewardError, counted, quoted
from lightning_rlhf.io.user_code import user_number

Parts = Sequence[tuple[int, float]]
"""Numbers of a response, each with the number of characters of the text at whose end it counts."""
Source = Callable[[records.DecodedResponses], Float[Tensor, " B"] | Sequence[float | Parts | None]]
"""Function that returns for each response one number, or parts whose sum it is."""


@dataclass(frozen=True)
class Reward:
    """Reward that PPO maximises: components, each with its term in the weighted sum."""

    terms: tuple[config.Term, ...]
    """Terms of the sum, one per component."""
    sources: tuple[Source, ...]
    """Functions that compute the components, in the order of `terms`."""

    @classmethod
    def of(cls, source: Source) -> Reward:
        """Return the reward of a single component, unchanged."""
        return cls(shaping.AS_IT_IS, (source,))

    @property
    def models(self) -> dict[str, tuple[nn.Module, str]]:
        """Return name -> (model, its role) of each component that a model computes here."""
        found = {}
        for term, source in zip(self.terms, self.sources, strict=True):
            if isinstance(module := getattr(source, "module", None), nn.Module):
                found[term.name] = module, str(getattr(source, "role", ""))
        return found

    def explain(self, decoded: records.DecodedResponses) -> list[dict[str, str]]:
        """Return the explanations of each response by the components, by their names."""
        found = [dict[str, str]() for _ in decoded.responses]
        for term, source in zip(self.terms, self.sources, strict=True):
            texts = source.explain(decoded) if hasattr(source, "explain") else None
            for explained, text in zip(found, texts or (), strict=False):
                explained |= {} if text is None else {term.name: str(text)}
        return found

    def spent(self) -> dict[str, float]:
        """Return what the components have cost since the last call, by the name of the metric."""
        total = Counter[str]()
        for source in self.sources:
            own = getattr(getattr(source, "function", None), "spent", dict)
            total.update(own())
        return dict(total)

    @torch.no_grad()
    def __call__(
        self, decoded: records.DecodedResponses
    ) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B K T"]]:
        """Return the numbers of each component before weights: of responses, and of their tokens.

        Raises RewardError as `checked` does.
        """
        columns = [
            checked(source(decoded), decoded, term.name)
            for term, source in zip(self.terms, self.sources, strict=True)
        ]
        numbers, parts = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
        return numbers, parts


def checked(
    found: Any, decoded: records.DecodedResponses, name: str
) -> tuple[Float[Tensor, " B"], Float[Tensor, "B T"]]:
    """Return the numbers that a component gave, in fp32 on the device of the responses.

    Returns: the number of each response, the sum of its parts where it gave `Parts`; and these
        parts at the tokens of `DecodedResponses.token_at`, 0 at the others.
    Raises RewardError unless there is for each response a finite number, or a list of finite
        numbers at ends within its text; names component, prompt and response.
    """
    numbers = found.tolist() if hasattr(found, "tolist") else found  # a tensor or an array
    if not isinstance(numbers, list | tuple) or len(numbers) != len(decoded):
        count = f", {len(numbers)} of them," if isinstance(numbers, list | tuple) else ""
        given = f"{quoted(numbers)}{count} for {counted(len(decoded), 'response')}"
        raise RewardError(f"reward {name!r} gave {given}; allowed: a list of one number for each")
    sums, placed = list[float](), torch.zeros(decoded.rollout.response_mask.shape)
    for i, (number, response) in enumerate(zip(numbers, decoded.responses, strict=True)):
        pairs: Any = [(None, number)]
        allowed = "a finite number"
        if isinstance(number, list | tuple):
            pairs = number
            allowed = f"a list of (end, finite number), with ends from 0 to its {len(response)}"
        try:
            parts = [(end, user_number(x)) for end, x in pairs]
            sums.append(torch.tensor(sum(x for _, x in parts), dtype=torch.float32).item())
            fits = all(end is None or end in range(len(response) + 1) for end, _ in parts)
            fits &= math.isfinite(sums[-1])
        except (OverflowError, RuntimeError, TypeError, ValueError):
            fits = False
        if not fits:
            empty = [name for name, value in decoded.rows[i].items() if value is None]
            allowed += f" (the row has no value in {', '.join(empty)})" if empty else ""
            prompt = quoted(decoded.rows[i]["prompt"])
            asked = f"the response {quoted(response)} to the prompt {prompt}"
            raise RewardError(
                f"reward {name!r} gave {quoted(number)} for {asked}; allowed: {allowed}"
            )
        for end, x in parts:
            if end is not None:
                placed[i, decoded.token_at(i, end)] += x
    device = decoded.rollout.tokens.device
    return torch.tensor(sums, dtype=torch.float32, device=device), placed.to(device)


@dataclass(frozen=True)
class LearnedReward:
    """Standardised reward of token sequences: (r - mean) / std - uncertainty_coef * u.

    The sequences are read as the policy wrote them. r and u are mean and population standard
    deviation over the heads of an ensemble, u in units of std. A Bradley-Terry reward has an
    arbitrary origin and scale; stage=rm measured mean and std, so that the SFT model's mean is 0.
    """

    rewards: Callable[..., Float[Tensor, "N H"]]
    """Reward model: function from (tokens, mask) to the number of each of H heads for each row, and
    with a third argument, `wanted`, at each token of this mask; see `Roles.rewards`."""
    mean: float
    """Mean of the raw reward over SFT samples."""
    std: float
    """Standard deviation of the raw reward over SFT samples."""
    uncertainty_coef: float
    """Weight of the deviation between the heads of an ensemble."""
    batch_size: memory.MicrobatchSize
    """Number of rows that are read at once; rows of similar lengths are read together."""
    module: nn.Module | None = None
    """Model that computes the rewards; None where it is not known."""
    role: str = ""
    """Role in which `module` reads."""
    step_separator: str | None = None
    """Text that ends a step of a response; the model is read at the last token of each step, and
    once more at that of the response. None reads it there alone."""

    @torch.no_grad()
    def __call__(self, decoded: records.DecodedResponses) -> Float[Tensor, " B"] | list[Parts]:
        if self.step_separator is not None:
            return self.by_step(decoded, re.escape(self.step_separator))
        tokens, mask = decoded.rollout.tokens, decoded.rollout.mask
        order = masking.by_length(mask)
        parts = self.batch_size.fitting(
            lambda size: [self.rewards(tokens[rows], mask[rows]) for rows in order.split(size)]
        )
        rewards = torch.cat(parts)[order.argsort()]
        return standardised(rewards, self.mean, self.std, self.uncertainty_coef)

    def by_step(self, decoded: records.DecodedResponses, separator: str) -> list[Parts]:
        """Return the standardised reward at the last token of each step of each response.

        Of steps that end in the same token the last counts. separator: a regular expression.
        """
        tokens, mask = decoded.rollout.tokens, decoded.rollout.mask
        first = mask.shape[1] - decoded.rollout.response_mask.shape[1]
        ends, wanted = list[dict[int, int]](), torch.zeros(mask.shape, dtype=torch.bool)
        for i, text in enumerate(decoded.responses):
            stops = [*(found.end() for found in re.finditer(separator, text)), len(text)]
            ends.append({first + decoded.token_at(i, end): end for end in stops})
            wanted[i, [*ends[i]]] = True
        order, wanted = masking.by_length(mask), wanted.to(mask.device)
        parts = self.batch_size.fitting(
            lambda size: [
                self.rewards(tokens[rows], mask[rows], wanted=wanted[rows])
                for rows in order.split(size)
            ]
        )
        scores = standardised(torch.cat(parts), self.mean, self.std, self.uncertainty_coef)
        read = scores.new_zeros(mask.shape).masked_scatter(wanted[order], scores)[order.argsort()]
        return [
            [(end, row[column]) for column, end in some.items()]
            for row, some in zip(read.tolist(), ends, strict=True)
        ]


def standardised(
    rewards: Float[Tensor, "B H"], mean: float, std: float, uncertainty_coef: float
) -> Float[Tensor, " B"]:
    """Return (r - mean - uncertainty_coef * u) / std; r, u: mean and deviation over the heads."""
    spread, reward = torch.std_mean(rewards, dim=1, correction=0)
    return (reward - mean - uncertainty_coef * spread) / std


Features = Mapping[str, list[int]]
"""Inputs of the model by name, one entry per token: "input_ids" and whatever else it takes."""


class TextModel(Protocol):
    """A reward model that reads text through a tokenizer of its own."""

    def encode(self, row: Mapping[str, Any], response: str) -> Features:
        """Return the tokens of the whole dialogue of a row of the data and a response."""

    def read(self, features: Sequence[Features]) -> Float[Tensor, "n H"]:
        """Return the raw number of each head for several dialogues, read at once."""

    def show(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens visible."""

    def problems(self, tokens: Sequence[int]) -> list[str]:
        """Return descriptions of what is wrong with a dialogue's tokens."""
        return []

    def doubts(self, row: Mapping[str, Any], response: str) -> list[str]:
        """Return descriptions of what may be wrong with how a dialogue is written."""
        return []

    def starts(self, tokens: Sequence[int]) -> int:
        """Return the number of special tokens at a dialogue's start, where some models read."""
        return 0


@dataclass(frozen=True)
class TextReward:
    """Standardised reward of dialogues as the reward model renders them, see `LearnedReward`."""

    model: TextModel
    mean: float
    std: float
    uncertainty_coef: float
    batch_size: memory.MicrobatchSize
    """Number of dialogues that are read at once; those of similar lengths are read together."""
    max_tokens: int | None
    """Maximum number of tokens that are read; None reads all. A longer dialogue loses the tokens
    that follow its start tokens; its end stays."""
    name: str
    """Key of the reward in the configuration, which warnings name."""
    module: nn.Module | None = None
    """Model that computes the rewards; None where it is not known."""
    role: str = ""
    """Role in which `module` reads; empty for a model without roles."""

    def __call__(self, decoded: records.DecodedResponses) -> Float[Tensor, " B"]:
        return self.score(decoded.rows, decoded.responses)

    @torch.no_grad()
    def score(
        self, rows: Sequence[Mapping[str, Any]], responses: Sequence[str]
    ) -> Float[Tensor, " B"]:
        """Return the score of each response to the prompt in its row, on the CPU."""
        encoded = [self.encode(*pair) for pair in zip(rows, responses, strict=True)]
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))
        in_order = [encoded[i] for i in order]
        parts = self.batch_size.fitting(
            lambda n: [self.model.read(in_order[i : i + n]) for i in range(0, len(in_order), n)]
        )
        rewards = torch.cat(parts).float().cpu()[torch.tensor(order).argsort()]
        return standardised(rewards, self.mean, self.std, self.uncertainty_coef)

    def encode(self, row: Mapping[str, Any], response: str) -> Features:
        """Return the tokens of a dialogue that are read."""
        features = self.model.encode(row, response)
        length = len(features["input_ids"])
        if self.max_tokens is None or length <= self.max_tokens:
            return features
        warnings.warn(  # shown once, as it always comes from this line
            f"{self.name}: dialogues of more than max_tokens={self.max_tokens} tokens lose "
            "their beginning before the reward model reads them",
            stacklevel=1,
        )
        start = self.model.starts(features["input_ids"][: self.max_tokens - 1])
        behind = length - self.max_tokens + start
        return {name: [*ids[:start], *ids[behind:]] for name, ids in features.items()}
