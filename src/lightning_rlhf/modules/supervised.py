"""Base class of the modules that learn from given texts: one optimizer step a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.config import SupervisedConfig
from lightning_rlhf.core.record import Record
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.optim import (
    advance_schedule,
    build_optimizer,
    check_parameters,
    check_processes,
    clip_gradients,
    step,
    sum_gradients,
    trainable_state,
)
from lightning_rlhf.modules.update_guard import UpdateGuard
from lightning_rlhf.parallel.replicas import ONE, Replicas

R = TypeVar("R", bound=Record)


class SupervisedModule(L.LightningModule):
    """Base class of SFT, the reward model and DPO, whose `training_step` calls `update`."""

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

    def update(self, loss: Tensor, grad_norm: Tensor) -> bool:
        """Make the optimizer step of a batch, unless loss or gradient is not finite.

        Return whether it was made. Raises as `UpdateGuard.check_finite`.
        """
        is_made = self.guard.check_finite(self, loss, grad_norm)
        if is_made:
            step(self)
        advance_schedule(self)
        self.iteration += 1
        return is_made

    def clipped(self, share: Tensor) -> tuple[Tensor, Tensor]:
        """Sum loss and gradient over all processes, and clip the gradient.

        share: loss of this process's rows, divided by the counts of the whole batch, 0-d.
        Returns: the loss, and the norm of its gradient before clipping, 0-d.
        """
        loss = sum_gradients(self, share[None]).sum()
        return loss, clip_gradients(self, self.config.max_grad_norm)

    @torch.no_grad()
    def row_losses(self, batch: Record) -> Float[Tensor, " B"]:
        """Return the loss of each row of a batch by itself, without a gradient."""
        return torch.stack([self.row_loss(row) for row in batch.split(1)])

    def row_loss(self, row: Any) -> Tensor:
        """Return the loss of a batch of one row, 0-d."""
        raise NotImplementedError

    def on_fit_start(self) -> None:
        check_processes(self)

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
