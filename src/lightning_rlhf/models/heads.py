"""Linear heads on hidden states: a scalar head for values, and an ensemble of heads for rewards."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """A linear map from a hidden state to a scalar, computed in fp32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)

    @classmethod
    def zeros(cls, hidden_size: int) -> ScalarHead:
        """Return a head with all weights 0, so that training of a value head starts from V = 0."""
        head = cls(hidden_size)
        nn.init.zeros_(head.linear.weight)
        nn.init.zeros_(head.linear.bias)
        return head

    def forward(self, hidden: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Return one fp32 number for each hidden state."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(hidden.float()).squeeze(-1)


class RewardHeads(nn.Module):
    """An ensemble of linear maps from a hidden state to a reward, computed in fp32."""

    def __init__(self, hidden_size: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, count)

    @classmethod
    def random(cls, hidden_size: int, count: int, generator: torch.Generator) -> RewardHeads:
        """Return `count` heads with weights drawn from N(0, std = 1 / sqrt(d + 1)) and bias 0.

        Source: Stiennon et al. 2020, appendix C, https://arxiv.org/abs/2009.01325
        """
        heads = cls(hidden_size, count)
        with torch.no_grad():
            heads.linear.weight.normal_(std=1 / math.sqrt(hidden_size + 1), generator=generator)
            heads.linear.bias.zero_()
        return heads

    def forward(self, hidden: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch H"]:
        """Return the fp32 output of each of the H heads for each hidden state."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(hidden.float())
