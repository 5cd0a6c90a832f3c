"""The critic: values of states from a head on the policy's trunk or on a model of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_rlhf.core.masking import by_length
from lightning_rlhf.core.types import Experience, SampledResponses
from lightning_rlhf.models.heads import ScalarHead
from lightning_rlhf.models.roles import POLICY, VALUE, Roles
from lightning_rlhf.rollout.score import response_hidden, scatter


@dataclass(frozen=True)
class Critic:
    """V(s_t), the value head on the hidden states of a role.

    On the policy's own trunk (role POLICY) it costs nothing while sampling. As an adapter or a
    separate model, its loss has no gradient in the policy, and it needs one more forward pass.
    """

    roles: Roles
    role: str

    @property
    def head(self) -> ScalarHead:
        """Return the value head."""
        head = self.roles.heads[VALUE]
        assert isinstance(head, ScalarHead)
        return head

    @property
    def shares_trunk(self) -> bool:
        """Return whether the head reads the policy's own hidden states."""
        return self.role == POLICY

    def values(
        self,
        batch: SampledResponses | Experience,
        *,
        policy_hidden: Float[Tensor, "N d"] | None = None,
    ) -> Float[Tensor, " N"]:
        """Return V before each real response token, row by row.

        policy_hidden: hidden states of the policy at these tokens, if known: a critic on its trunk
            then needs no forward pass.
        """
        if self.shares_trunk and policy_hidden is not None:
            return self.head(policy_hidden)
        with self.roles.use_role(self.role):
            return self.head(response_hidden(self.roles, batch))

    @torch.no_grad()
    def all_values(
        self, batch: SampledResponses | Experience, batch_size: int
    ) -> Float[Tensor, "B T"]:
        """Return V before each response token, 0 on padding, `batch_size` rows at a time."""
        order = by_length(batch.mask)
        values = [self.values(batch.select(rows)) for rows in order.split(batch_size)]
        return scatter(values, batch.response_mask[order])[order.argsort()]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that only the critic trains."""
        yield from self.head.parameters()
        if not self.shares_trunk:
            yield from self.roles.trained_by(self.role)
