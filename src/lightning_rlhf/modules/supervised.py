"""Base class of the modules that learn from given texts, and supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import lightning as L
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rlhf.core.config import SFTConfig, SupervisedConfig
from lightning_rlhf.core.logprobs import token_logprobs
from lightning_rlhf.core.masking import picker
from lightning_rlhf.core.records import Demonstrations, Record
from lightning_rlhf.core.results import RESULT, SFTEvaluation, SFTStep
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.optim import (
    UpdateGuard,
    advance_schedule,
    backward,
    build_optimizer,
    check_epochs_and_replicas,
    check_parameters,
    clip_gradients,
    halving_microbatches,
    log_headline,
    step,
    sum_gradients,
    trainable_state,
    zero_gradients,
)
from lightning_rlhf.parallel.replicas import ONE, Replicas

R = TypeVar("R", bound=Record)


class SupervisedModule(L.LightningModule):
    """Base class of SFT, the reward model and DPO, which differ in `accumulate`."""

    step_type: type[Any]
    """Class of the result of a step."""

    def __init__(
        self,
        stage: str,
        role: str,
        roles: Roles,
        config: SupervisedConfig,
        replicas: Replicas = ONE,
    ) -> None:
        """Make the module before its first step.

        Args:
            stage: key of its section.
            role: role that is trained.
            replicas: processes that divide the rows of each batch.
        """
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        self.role = role
        self.roles = roles
        self.config = config
        self.replicas = replicas
        self.guard = UpdateGuard(stage, config)
        self.iteration = 0
        """Number of finished batches, over all resumes; updates that were not made count too."""
        self.logs_headline = True
        """False where a callback logs the headline metrics together with all others."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss, grad_norm, facts = self.gradient(batch)
        is_made = self.guard.check_finite(self, loss, grad_norm)
        if is_made:
            step(self)
        advance_schedule(self)
        self.iteration += 1
        result = self.step_type(loss=loss, grad_norm=grad_norm, is_made=is_made, **facts)
        log_headline(self, result.headline)
        return {RESULT: result}

    def gradient(self, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Backpropagate the loss of a batch over all processes, and clip the gradient.

        Returns: the loss and the norm of its gradient before clipping, 0-d, and what else the
            result of the step holds, from before the update.
        """
        share, parts = self.accumulate(batch)
        loss = sum_gradients(self, share[None]).sum()
        return loss, clip_gradients(self, self.config.max_grad_norm), self.facts(parts, batch)

    def accumulate(self, batch: Any) -> tuple[Tensor, list[Any]]:
        """Backpropagate this process's rows of a batch.

        Returns: their share of its loss, 0-d, and the scores of each micro-batch.
        """
        raise NotImplementedError

    def facts(self, parts: Sequence[Record], batch: Any) -> dict[str, Tensor]:
        """Return the scores of a batch by name, from those of this process's micro-batches."""
        return vars(self.joined(parts, batch))

    @torch.no_grad()
    def row_losses(self, batch: Record) -> Float[Tensor, " B"]:
        """Return the loss of each row of a batch by itself, without a gradient."""
        return torch.stack([self.row_loss(row) for row in batch.split(1)])

    def row_loss(self, row: Any) -> Tensor:
        """Return the loss of a batch of one row, 0-d."""
        raise NotImplementedError

    def on_fit_start(self) -> None:
        check_epochs_and_replicas(self)

    def joined(self, parts: Sequence[R], batch: Record) -> R:
        """Return the records of the rows of a batch from those of each process's rows.

        parts: records of this process's micro-batches.
        """
        rows = self.replicas.share(torch.arange(len(batch), device=self.device))
        return self.replicas.joined(rows, lambda _: type(parts[0]).joined(parts))

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


def target_logprobs(
    roles: Roles, tokens: Int[Tensor, "B S"], target_mask: Bool[Tensor, "B S"]
) -> Float[Tensor, " N"]:
    """Return the log-probability of each target token under the active role, row after row, nats.

    target_mask: True on the tokens to be predicted, none of which is the first of its row. Where it
        is on the CPU, the device of the tokens is not waited for.
    """
    mask = target_mask[:, 1:]
    hidden = roles.hidden_at(tokens[:, :-1], mask)
    logprobs, _ = token_logprobs(
        hidden, picker(mask)(tokens[:, 1:]), roles.head,
        temperature=1.0, vocab_size=roles.vocab_size, frozen_head=not roles.head_is_trained,
        row_multiple=roles.row_multiple,
    )  # fmt: skip
    return logprobs


class SFTModule(SupervisedModule):
    """Cross-entropy on the tokens of the response and its end token, mean over the batch's tokens.

    Source: Ouyang et al. 2022, section 3.5, https://arxiv.org/abs/2203.02155
    """

    config: SFTConfig
    step_type = SFTStep

    def __init__(self, roles: Roles, config: SFTConfig, replicas: Replicas = ONE) -> None:
        super().__init__("sft", roles.role, roles, config, replicas)

    @halving_microbatches
    def accumulate(self, batch: Demonstrations) -> tuple[Tensor, list[Any]]:
        zero_gradients(self)
        loss, tokens = torch.zeros((), device=self.device), batch.target_mask.sum()
        size, mine = self.guard.microbatch.rows, batch.select(self.replicas.rows)
        targets = mine.target_mask.cpu().split(size)
        for micro_batch, mask in zip(mine.split(size), targets, strict=False):
            loss += backward(self, -self.logprobs(micro_batch, mask).sum() / tokens)
        return loss, []

    def facts(self, parts: Sequence[Record], batch: Demonstrations) -> dict[str, Tensor]:
        return {"tokens": batch.target_mask.sum()}

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
