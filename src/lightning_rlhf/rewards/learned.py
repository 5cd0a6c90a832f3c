"""Reward models: of the policy's own tokens, and of text through a tokenizer of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_rlhf.core.masking import by_length
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.records import DecodedResponses

TokenRewards = Callable[[Int[Tensor, "B S"], Bool[Tensor, "B S"]], Float[Tensor, "B H"]]
"""Function from (tokens, mask) to the number of each of H heads for each row."""


@dataclass(frozen=True)
class LearnedReward:
    """Standardised reward of token sequences: (r - mean) / std - uncertainty_coef * u.

    The sequences are read as the policy wrote them. r and u are mean and population standard
    deviation over the heads of an ensemble, u in units of std. A Bradley-Terry reward is defined up
    to a constant and has an arbitrary scale; mean and std were measured on SFT samples at the end
    of stage=rm, so that the SFT model's mean reward is 0.
    """

    rewards: TokenRewards
    """Reward model, as a function from (tokens, mask) to the number of each head for each row."""
    mean: float
    """Mean of the raw reward over SFT samples."""
    std: float
    """Standard deviation of the raw reward over SFT samples."""
    uncertainty_coef: float
    """Weight of the deviation between the heads of an ensemble."""
    batch_size: MicrobatchSize
    """Number of rows that are read at once; rows of similar lengths are read together."""
    module: nn.Module | None = None
    """Model that `rewards` computes with; None where it is not known."""
    role: str = ""
    """Role in which `module` reads."""

    @torch.no_grad()
    def __call__(self, decoded: DecodedResponses) -> Float[Tensor, " B"]:
        rollout = decoded.rollout
        order = by_length(rollout.mask)
        parts = self.batch_size.fitting(
            lambda size: [
                self.rewards(rollout.tokens[rows], rollout.mask[rows]) for rows in order.split(size)
            ]
        )
        rewards = torch.cat(parts)[order.argsort()]
        return standardised(rewards, self.mean, self.std, self.uncertainty_coef)


def standardised(
    rewards: Float[Tensor, "B H"], mean: float, std: float, uncertainty_coef: float
) -> Float[Tensor, " B"]:
    """Return (r - mean - uncertainty_coef * u) / std; r and u: mean and deviation over the
    heads."""
    spread, reward = torch.std_mean(rewards, dim=1, correction=0)
    return (reward - mean - uncertainty_coef * spread) / std


Features = Mapping[str, list[int]]
"""Inputs of the model by name, one entry per token: "input_ids" and whatever else it takes."""


@dataclass(frozen=True)
class TextModel:
    """Functions that a reward model of text provides."""

    encode: Callable[[Mapping[str, Any], str], Features]
    """Function from (row of the data, response) to the tokens of the whole dialogue."""
    read: Callable[[Sequence[Features]], Float[Tensor, "n H"]]
    """Function from several dialogues, read at once, to the raw number of each head [n,H]."""
    show: Callable[[Sequence[int]], str]
    """Function from tokens to text with special tokens visible."""
    problems: Callable[[Sequence[int]], list[str]] = lambda tokens: []
    """Function from a dialogue's tokens to descriptions of what is wrong with them."""
    doubts: Callable[[Mapping[str, Any], str], list[str]] = lambda row, response: []
    """Function from (row of the data, response) to descriptions of what may be wrong with how the
    dialogue is written."""
    starts: Callable[[Sequence[int]], int] = lambda tokens: 0
    """Function from a dialogue's tokens to the number of special tokens at its start, where some
    models read."""
    module: nn.Module | None = None
    """Model that `read` computes with; None where it is not known."""
    role: str = ""
    """Role in which `module` reads; empty for a model without roles."""


@dataclass(frozen=True)
class TextReward:
    """Standardised reward of dialogues as the reward model renders them, see `LearnedReward`."""

    model: TextModel
    """Reward model that reads the dialogues."""
    mean: float
    """Mean of the raw reward, which is subtracted."""
    std: float
    """Standard deviation of the raw reward, by which it is divided."""
    uncertainty_coef: float
    """Weight of the deviation between the heads of an ensemble."""
    batch_size: MicrobatchSize
    """Number of dialogues that are read at once; those of similar lengths are read together."""
    max_tokens: int | None
    """Maximum number of tokens that are read; None reads all. A longer dialogue loses the tokens
    that follow its start tokens; its end stays."""
    name: str
    """Key of the reward in the configuration, which warnings name."""

    def __call__(self, decoded: DecodedResponses) -> Float[Tensor, " B"]:
        return self.score(decoded.rows, decoded.responses)

    @torch.no_grad()
    def score(
        self, rows: Sequence[Mapping[str, Any]], responses: Sequence[str]
    ) -> Float[Tensor, " B"]:
        """Return the score of each response to the prompt in its row, on the CPU."""
        encoded = [self.encode(*pair) for pair in zip(rows, responses, strict=True)]
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))
        parts = self.batch_size.fitting(
            lambda size: [
                self.model.read([encoded[i] for i in order[start : start + size]])
                for start in range(0, len(order), size)
            ]
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

    def rendered(self, row: Mapping[str, Any], response: str) -> str:
        """Return the text that the reward model reads, special tokens visible."""
        return self.model.show(self.encode(row, response)["input_ids"])

    def problems(self, row: Mapping[str, Any], response: str) -> list[str]:
        """Return descriptions of what is wrong with the tokens that are read."""
        return self.model.problems(self.encode(row, response)["input_ids"])
