"""Supervised fine-tuning: imitate demonstrations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.config import SFTConfig
from lightning_rlhf.core.logprobs import token_logprobs
from lightning_rlhf.core.types import Demonstrations
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.learner import Learner, by_row
from lightning_rlhf.modules.optim import (
    advance_schedule,
    build_optimizer,
    check_parameters,
    trainable_state,
)


class SFTModule(L.LightningModule):
    """Cross-entropy on the tokens of the response and its end token, mean over the batch's tokens.

    Source: Ouyang et al. 2022, section 3.5, https://arxiv.org/abs/2203.02155
    """

    def __init__(self, roles: Roles, config: SFTConfig) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        self.roles = roles
        self.config = config
        self.learner = Learner("sft", config)
        self.iteration = 0
        """Finished batches, over all resumes; an update that was not made counts too."""

    def training_step(self, batch: Demonstrations, batch_idx: int) -> dict[str, Any]:
        tokens = batch.target_mask.sum()

        def losses(size: int) -> Iterator[Tensor]:
            return (self.nll_sum(part) / tokens for part in batch.split(size))

        loss, grad_norm = self.learner.gradient(self, losses)
        is_made = self.learner.step(self, loss, grad_norm)
        advance_schedule(self)
        self.iteration += 1
        return {"loss": loss, "tokens": tokens, "grad_norm": grad_norm, "is_made": is_made}

    def validation_step(self, batch: Demonstrations, batch_idx: int) -> dict[str, Tensor]:
        nll_sum = self.learner.microbatch.fitting(
            lambda size: torch.stack([self.nll_sum(part) for part in batch.split(size)]).sum()
        )
        return {"nll_sum": nll_sum, "tokens": batch.target_mask.sum()}

    def predict_step(self, batch: Demonstrations, batch_idx: int) -> dict[str, Tensor]:
        """What the model as it is now says of each row by itself, as `by_row`.

        Returns: the rows' loss and grad_norm [B], of the mean over the row's target tokens, nats;
            logprobs [N] of the target tokens, row after row.
        """

        def facts(row: Demonstrations) -> dict[str, Tensor]:
            logprobs = self.logprobs(row)
            return {"loss": -logprobs.mean(), "logprobs": logprobs}

        return by_row(self, batch, facts)

    def nll_sum(self, batch: Demonstrations) -> Tensor:
        """Negative log-likelihood of the target tokens, nats, summed over the batch; 0-d."""
        return -self.logprobs(batch).sum()

    def logprobs(self, batch: Demonstrations) -> Float[Tensor, " N"]:
        """Log-probability of each target token, row after row, nats."""
        mask = batch.target_mask[:, 1:]
        hidden = self.roles.hidden_at(batch.tokens[:, :-1], mask)
        logprobs, _ = token_logprobs(
            hidden, batch.tokens[:, 1:][mask], self.roles.head,
            temperature=1.0, vocab_size=self.roles.vocab_size,
            frozen_head=not self.roles.head_is_trained,
        )  # fmt: skip
        return logprobs

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        return build_optimizer([(1.0, self.roles.parameters())], self.config, steps)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return trainable_state(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["iteration"] = self.iteration
        checkpoint["learner"] = self.learner.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_parameters(self, checkpoint)
        self.iteration = checkpoint["iteration"]
        self.learner.load_state_dict(checkpoint["learner"])
