"""Supervised fine-tuning: imitate demonstrations."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rlhf.core.config import SFTConfig
from lightning_rlhf.core.results import RESULT, SFTEvaluation, SFTStep
from lightning_rlhf.core.types import Demonstrations
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.optim import (
    backward,
    log_headline,
    zero_gradients,
)
from lightning_rlhf.modules.supervised import SupervisedModule
from lightning_rlhf.modules.target_logprobs import target_logprobs
from lightning_rlhf.modules.update_guard import halving_microbatches
from lightning_rlhf.parallel.replicas import ONE, Replicas


class SFTModule(SupervisedModule):
    """Cross-entropy on the tokens of the response and its end token, mean over the batch's tokens.

    Source: Ouyang et al. 2022, section 3.5, https://arxiv.org/abs/2203.02155
    """

    config: SFTConfig

    def __init__(self, roles: Roles, config: SFTConfig, replicas: Replicas = ONE) -> None:
        super().__init__("sft", roles.role, roles, config, replicas)

    def training_step(self, batch: Demonstrations, batch_idx: int) -> dict[str, SFTStep]:
        loss, grad_norm = self.gradient(batch)
        is_made = self.update(loss, grad_norm)
        result = SFTStep(
            loss=loss, tokens=batch.target_mask.sum(), grad_norm=grad_norm, is_made=is_made,
        )  # fmt: skip
        log_headline(self, result.headline)
        return {RESULT: result}

    def gradient(self, batch: Demonstrations) -> tuple[Tensor, Tensor]:
        """Backpropagate the loss of a batch over all processes, and clip the gradient.

        Returns: the loss, and the norm of its gradient before clipping, 0-d.
        """
        return self.clipped(self.accumulate(batch))

    @halving_microbatches
    def accumulate(self, batch: Demonstrations) -> Tensor:
        """Backpropagate this process's rows of a batch; return their share of its loss, 0-d."""
        zero_gradients(self)
        loss, tokens = torch.zeros((), device=self.device), batch.target_mask.sum()
        size, mine = self.guard.microbatch.rows, batch.select(self.replicas.rows)
        targets = mine.target_mask.cpu().split(size)
        for micro_batch, mask in zip(mine.split(size), targets, strict=False):
            loss += backward(self, -self.logprobs(micro_batch, mask).sum() / tokens)
        return loss

    def validation_step(self, batch: Demonstrations, batch_idx: int) -> SFTEvaluation:  # type: ignore[override]
        nll_sum = self.replicas.sum(self.nll_of_share(batch))
        return SFTEvaluation(nll_sum=nll_sum, tokens=batch.target_mask.sum())

    @halving_microbatches
    def nll_of_share(self, batch: Demonstrations) -> Tensor:
        """Return `nll_sum` of this process's rows of a batch."""
        rows = batch.select(self.replicas.rows)
        sums = [self.nll_sum(micro_batch) for micro_batch in rows.split(self.guard.microbatch.rows)]
        return torch.stack(sums).sum() if sums else torch.zeros((), device=self.device)

    def row_loss(self, row: Demonstrations) -> Tensor:
        """Return the loss of a batch of one row, 0-d."""
        return -self.logprobs(row).mean()

    def nll_sum(self, batch: Demonstrations) -> Tensor:
        """Return the negative log-likelihood of the batch's target tokens, summed, nats; 0-d."""
        return -self.logprobs(batch).sum()

    def logprobs(
        self, batch: Demonstrations, targets: Bool[Tensor, "B S"] | None = None
    ) -> Float[Tensor, " N"]:
        """Return the log-probability of each target token, row after row, nats.

        targets: the batch's `target_mask` on the CPU, where it is known.
        """
        mask = batch.target_mask if targets is None else targets
        return target_logprobs(self.roles, batch.tokens, mask)
