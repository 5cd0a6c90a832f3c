"""Supervised fine-tuning: imitate demonstrations."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.config import SFTConfig
from lightning_rlhf.core.results import RESULT, SFTEvaluation, SFTRows, SFTStep
from lightning_rlhf.core.types import Demonstrations
from lightning_rlhf.models.flops import Flops, role_flops
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.optim import (
    advance_schedule,
    backward,
    build_optimizer,
    check_parameters,
    clip_gradients,
    log_headline,
    step,
    trainable_state,
    zero_gradients,
)
from lightning_rlhf.modules.step_compute import sft_compute
from lightning_rlhf.modules.target_logprobs import target_logprobs
from lightning_rlhf.modules.update_guard import UpdateGuard, facts_by_row, halving_microbatches


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
        self.guard = UpdateGuard("sft", config)
        self.iteration = 0
        """Number of finished batches, over all resumes; updates that were not made count too."""
        self.logs_headline = True
        """False where a callback logs the headline metrics together with all others."""

    def training_step(self, batch: Demonstrations, batch_idx: int) -> dict[str, SFTStep]:
        started = time.perf_counter()
        loss, grad_norm = self.gradient(batch)
        is_made = self.guard.check_finite(self, loss, grad_norm)
        if is_made:
            step(self)
        advance_schedule(self)
        self.iteration += 1
        result = SFTStep(
            loss=loss, tokens=batch.target_mask.sum(), grad_norm=grad_norm, is_made=is_made,
            compute=sft_compute(
                self.flops, batch,
                microbatch_size=self.guard.microbatch.rows,
                head_is_trained=self.roles.head_is_trained,
                seconds=time.perf_counter() - started,
            ),
        )  # fmt: skip
        log_headline(self, result.headline)
        return {RESULT: result}

    @cached_property
    def flops(self) -> Flops:
        """Return the sizes of the model, from which the operations of a step follow."""
        return role_flops(self.roles, self.roles.role)

    @halving_microbatches
    def gradient(self, batch: Demonstrations) -> tuple[Tensor, Tensor]:
        """Backpropagate the loss of a batch; return it and the norm of its gradient, 0-d."""
        zero_gradients(self)
        loss, tokens = torch.zeros((), device=self.device), batch.target_mask.sum()
        for micro_batch in batch.split(self.guard.microbatch.rows):
            loss += backward(self, self.nll_sum(micro_batch) / tokens)
        return loss, clip_gradients(self, self.config.max_grad_norm)

    @halving_microbatches
    def validation_step(self, batch: Demonstrations, batch_idx: int) -> SFTEvaluation:  # type: ignore[override]
        micro_batches = batch.split(self.guard.microbatch.rows)
        nll_sum = torch.stack([self.nll_sum(micro_batch) for micro_batch in micro_batches]).sum()
        return SFTEvaluation(nll_sum=nll_sum, tokens=batch.target_mask.sum())

    def predict_step(self, batch: Demonstrations, batch_idx: int) -> SFTRows:
        """Return loss, gradient norm and log-probabilities of each row by itself."""

        def facts(row: Demonstrations) -> dict[str, Tensor]:
            logprobs = self.logprobs(row)
            return {"loss": -logprobs.mean(), "logprobs": logprobs}

        return SFTRows(**facts_by_row(self, batch, facts))

    def nll_sum(self, batch: Demonstrations) -> Tensor:
        """Return the negative log-likelihood of the batch's target tokens, summed, nats; 0-d."""
        return -self.logprobs(batch).sum()

    def logprobs(self, batch: Demonstrations) -> Float[Tensor, " N"]:
        """Return the log-probability of each target token, row after row, nats."""
        return target_logprobs(self.roles, batch.tokens, batch.target_mask)

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        return build_optimizer([(1.0, self.roles.parameters())], self.config, steps)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return trainable_state(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["iteration"] = self.iteration
        checkpoint["learner"] = self.guard.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_parameters(self, checkpoint)
        self.iteration = checkpoint["iteration"]
        self.guard.load_state_dict(checkpoint["learner"])
