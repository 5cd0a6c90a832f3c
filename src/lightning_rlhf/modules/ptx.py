"""PPO-ptx: a batch of demonstrations in each update of PPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.records import Demonstrations
from lightning_rlhf.data.batches import Schedule, collate_demonstrations, digest_examples
from lightning_rlhf.data.lengths import DemonstrationTokens
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules import optim
from lightning_rlhf.modules.supervised import target_logprobs


class PTX:
    """Term of the loss of stage=sft, on demonstrations, in the loss of each update of PPO.

        loss = PPO's loss + ptx_coef * ptx_loss
        ptx_loss = 1/N sum_i sum_t -log pi(y_it | x_i, y_i<t)

    The sums are over the demonstrations of a batch and their N target tokens, at temperature 1. The
    batch of update m in iteration k is number k * M + m of a `Schedule`, where M is the number of
    updates in an iteration: a function of (seed, k, m), in which all demonstrations come once
    before one comes again. Updates that ppo.target_kl leaves out leave out their batches.
    Source: Ouyang et al. 2022, eq. 2, https://arxiv.org/abs/2203.02155
    Departs: the texts are the demonstrations of SFT instead of those of pretraining, and the mean
    is over tokens.
    """

    def __init__(
        self,
        examples: Sequence[DemonstrationTokens],
        config: PPOConfig,
        *,
        pad_id: int,
        seed: int,
    ) -> None:
        """Set up the batches; pad_id: id of the padding token; seed: seed of their order."""
        self.examples = examples
        self.coef = config.ptx_coef
        self.updates = config.updates_per_iteration
        self.pad_id = pad_id
        self.schedule = Schedule(
            lengths=[example.length for example in examples],
            batch_size=config.ptx_batch_size,
            batches=config.iterations * self.updates,
            seed=seed,
            pool_batches=1,
        )

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest demonstration."""
        return max(example.length for example in self.examples)

    def batch(self, iteration: int, update: int) -> Demonstrations:
        """Return the demonstrations of an update; both numbers count from 0."""
        rows = self.schedule.batch(iteration * self.updates + update)
        return collate_demonstrations([self.examples[row] for row in rows], self.pad_id)

    def backpropagate(
        self, module: Any, roles: Roles, batch: Demonstrations, rows: int
    ) -> Float[Tensor, ""]:
        """Add the gradient of ptx_coef * ptx_loss of this process's rows; return their share of it.

        The role that is active is read. rows: number of demonstrations in a forward and backward
        pass. The share of each pass is divided by the target tokens of the whole batch, so that the
        shares add up.
        """
        batch = batch.to(module.device)
        tokens, loss = batch.target_mask.sum(), torch.zeros((), device=module.device)
        for part in batch.select(module.replicas.rows).split(rows):
            share = -target_logprobs(roles, part.tokens, part.target_mask).sum() / tokens
            optim.backward(module, self.coef * share)
            loss = loss + share.detach()
        return loss

    @cached_property
    def digest(self) -> str:
        """Return a digest of the demonstrations in their order."""
        return digest_examples(self.examples)

    def check(self, checkpoint: Mapping[str, Any]) -> None:
        """Raise CheckpointError where a checkpoint was trained on other demonstrations."""
        if "ptx" in checkpoint and checkpoint["ptx"] != self.digest:
            raise CheckpointError(
                "the demonstrations of ppo.ptx_coef are others now, or in another order (digest "
                f"{self.digest}, was {checkpoint['ptx']})"
            )
