"""A reward model that reads text: through its own tokenizer and chat template."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.device_memory import MicrobatchSize
from lightning_rlhf.core.types import Replies
from lightning_rlhf.rewards.learned import standardised

Features = Mapping[str, list[int]]
""""input_ids", and what else the model takes of each token."""


@dataclass(frozen=True)
class TextModel:
    """What a reward model must be able to do."""

    encode: Callable[[Mapping[str, Any], str], Features]
    """(row of the data, response) -> the tokens of the whole dialogue."""
    read: Callable[[Sequence[Features]], Float[Tensor, "n H"]]
    """The raw number of each head for some dialogues, read at once."""
    show: Callable[[Sequence[int]], str]
    """Tokens as text, special ones visible."""
    problems: Callable[[Sequence[int]], list[str]] = lambda tokens: []
    """What is wrong with the tokens of a dialogue, in words."""
    doubts: Callable[[Mapping[str, Any], str], list[str]] = lambda row, response: []
    """What may be wrong with how a dialogue is written, in words."""
    starts: Callable[[Sequence[int]], int] = lambda tokens: 0
    """How many tokens at the start of a dialogue are special; some models read there."""


@dataclass(frozen=True)
class TextReward:
    """Standardised reward of dialogues as the reward model renders them, as `LearnedReward`."""

    model: TextModel
    mean: float
    std: float
    uncertainty_coef: float
    """Price of the deviation between the heads of an ensemble."""
    batch_size: MicrobatchSize
    """Dialogues that are read at once, of alike lengths."""
    max_tokens: int | None
    """None reads all. A longer dialogue loses what follows its start tokens; its end stays."""
    name: str
    """Its key in the configuration, which warnings name."""

    def __call__(self, replies: Replies) -> Float[Tensor, " B"]:
        return self.score(replies.rows, replies.responses)

    @torch.no_grad()
    def score(
        self, rows: Sequence[Mapping[str, Any]], responses: Sequence[str]
    ) -> Float[Tensor, " B"]:
        """Of each response to the prompt in its row; on the CPU."""
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
        """The tokens of a dialogue that are read."""
        features = self.model.encode(row, response)
        length = len(features["input_ids"])
        if self.max_tokens is None or length <= self.max_tokens:
            return features
        warnings.warn(  # shown once, since it always comes from this line
            f"{self.name}: dialogues of more than max_tokens={self.max_tokens} tokens lose "
            "their beginning before the reward model reads them",
            stacklevel=1,
        )
        start = self.model.starts(features["input_ids"][: self.max_tokens - 1])
        behind = length - self.max_tokens + start
        return {name: [*ids[:start], *ids[behind:]] for name, ids in features.items()}

    def rendered(self, row: Mapping[str, Any], response: str) -> str:
        """What the reward model reads, special tokens visible."""
        return self.model.show(self.encode(row, response)["input_ids"])

    def problems(self, row: Mapping[str, Any], response: str) -> list[str]:
        """What is wrong with it, in words."""
        return self.model.problems(self.encode(row, response)["input_ids"])
