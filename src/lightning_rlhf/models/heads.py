"""Linear heads on hidden states: one for values, one or an ensemble for rewards."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """A linear map from a hidden state to one number, computed in fp32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)

    @classmethod
    def zeros(cls, hidden_size: int) -> ScalarHead:
        """All zero, so that training starts from V = 0: a value head."""
        head = cls(hidden_size)
        nn.init.zeros_(head.linear.weight)
        nn.init.zeros_(head.linear.bias)
        return head

    def forward(self, hidden: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """One fp32 number for each hidden state."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(hidden.float()).squeeze(-1)


class RewardHeads(nn.Module):
    """An ensemble of linear maps from a hidden state to a reward, computed in fp32."""

    def __init__(self, hidden_size: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, count)

    @classmethod
    def random(cls, hidden_size: int, count: int, generator: torch.Generator) -> RewardHeads:
        """Weights from N(0, 1 / sqrt(d + 1)) (standard deviation), bias 0.

        Source: Stiennon et al. 2020, appendix C, https://arxiv.org/abs/2009.01325
        """
        heads = cls(hidden_size, count)
        with torch.no_grad():
            heads.linear.weight.normal_(std=1 / math.sqrt(hidden_size + 1), generator=generator)
            heads.linear.bias.zero_()
        return heads

    def forward(self, hidden: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch H"]:
        """The fp32 number of each head for each hidden state."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(hidden.float())
