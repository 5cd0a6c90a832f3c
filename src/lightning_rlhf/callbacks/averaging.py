"""The exponential moving average of the weights that a run trains."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_rlhf.core.errors import require

AVERAGE = "averaged_weights"
"""Checkpoint key of the average of each weight, by its name in `state_dict`."""
PREFIX = "roles."
"""Start of the names of the weights that are averaged: those of a module's attribute `roles`."""


class WeightAverage(Callback):
    """Averages the trained weights of a module's `roles` over optimizer steps.

        average_1 = weights_1
        average_k = decay * average_{k-1} + (1 - decay) * weights_k

    weights_k are those after the k-th optimizer step of the run: the average is one over about
    1 / (1 - decay) steps. Validations are of the average, and the module has it after
    `Trainer.fit`. Checkpoints hold the trained weights, from which a run resumes, and the average.
    Source: Tarvainen and Valpola 2017, section 2, https://arxiv.org/abs/1703.01780
    Departs: the average starts at the weights after the first step, as in torch.optim.swa_utils.
    """

    def __init__(self, decay: float) -> None:
        """Make the callback before the first step; decay: above 0 and below 1."""
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        """Average of each weight; empty before the first step. While the module has the average,
        the trained weights."""
        self._update = get_ema_multi_avg_fn(decay)
        self._is_swapped = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average after every step of the optimizer from now on.

        Raises ConfigError where the module trains no weights in `roles`.
        """
        trained = averaged_weights(pl_module)
        allowed = f"null for {type(pl_module).__name__}, which trains no weights in `roles`"
        require(bool(trained), "ema_decay", self.decay, allowed)
        # Those of a checkpoint come on the CPU.
        self.average = {name: x.to(trained[name].device) for name, x in self.average.items()}
        trainer.optimizers[0].register_step_post_hook(lambda *_: self.update(pl_module))

    def update(self, module: LightningModule) -> None:
        """Take the present weights into the average."""
        trained = averaged_weights(module)
        if self.average:
            self._update(
                [*self.average.values()], [*trained.values()], 0
            )  # the count has no effect
        else:
            self.average = {name: weights.clone() for name, weights in trained.items()}

    def swap(self, module: LightningModule) -> None:
        """Exchange the module's weights and `average`, unless no step was made."""
        with torch.inference_mode(False), torch.no_grad():
            for name, weights in averaged_weights(module).items():
                if name in self.average:
                    before = weights.clone()
                    weights.copy_(self.average[name])
                    self.average[name].copy_(before)
        self._is_swapped = not self._is_swapped

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap(pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._is_swapped:
            self.swap(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the module. Called also where a resumed run has no batch left."""
        self.swap(pl_module)
        self.average, self._is_swapped = {}, False

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.average:
            checkpoint[AVERAGE] = dict(self.average)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if AVERAGE in checkpoint:  # there is none before the first step
            self.average = {name: x.clone() for name, x in checkpoint[AVERAGE].items()}


def averaged_weights(module: LightningModule) -> dict[str, Tensor]:
    """Return the weights that are averaged, by their names, without a graph.

    They share the memory of the module's parameters.
    """
    return {
        name: parameter.detach()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name.startswith(PREFIX)
    }
