"""What each state was worth: the critic, wherever it lives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_rlhf.core.types import Experience, Rollout
from lightning_rlhf.models.heads import ScalarHead
from lightning_rlhf.models.roles import POLICY, VALUE, Roles
from lightning_rlhf.rollout.score import by_length, response_hidden, spread


@dataclass(frozen=True)
class Critic:
    """V(s_t), the value head on the hidden states of a role.

    On the policy's own trunk (role POLICY) it costs nothing while sampling. As an adapter or as a
    model of its own its loss has no gradient in the policy, and it reads every response once more.
    """

    roles: Roles
    role: str

    @property
    def head(self) -> ScalarHead:
        """The value head."""
        head = self.roles.heads[VALUE]
        assert isinstance(head, ScalarHead)
        return head

    @property
    def shares_trunk(self) -> bool:
        """Whether the policy's hidden states are its own."""
        return self.role == POLICY

    def values(self, batch: Rollout | Experience) -> Float[Tensor, " N"]:
        """V before each real response token, row by row."""
        with self.roles.acting(self.role):
            return self.head(response_hidden(self.roles, batch))

    @torch.no_grad()
    def all_values(self, batch: Rollout | Experience, batch_size: int) -> Float[Tensor, "B T"]:
        """V before each response token, 0 on padding, computed `batch_size` rows at a time."""
        order = by_length(batch.mask)
        parts = [self.values(batch.select(rows)) for rows in order.split(batch_size)]
        return spread(parts, batch.response_mask[order])[order.argsort()]

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is the critic's alone to train."""
        yield from self.head.parameters()
        if not self.shares_trunk:
            yield from self.roles.trained_by(self.role)
