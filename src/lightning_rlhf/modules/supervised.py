"""Base class of the modules that learn from given texts: one optimizer step a batch."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import lightning as L
from torch import Tensor

from lightning_rlhf.core.config import SupervisedConfig
from lightning_rlhf.models.flops import Flops, role_flops
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.optim import (
    advance_schedule,
    build_optimizer,
    check_parameters,
    step,
    trainable_state,
)
from lightning_rlhf.modules.update_guard import UpdateGuard


class SupervisedModule(L.LightningModule):
    """Base class of SFT, the reward model and DPO, whose `training_step` calls `update`."""

    def __init__(self, stage: str, role: str, roles: Roles, config: SupervisedConfig) -> None:
        """Make the module; stage: key of its section; role: role that is trained."""
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        self.role = role
        self.roles = roles
        self.config = config
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

    @cached_property
    def flops(self) -> Flops:
        """Return the sizes of the model, from which the operations of a step follow."""
        return role_flops(self.roles, self.role)

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
