"""The metrics of the first process, for the callbacks of the others."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rlhf.callbacks.contract import is_evaluation, ppo_view
from lightning_rlhf.parallel.replicas import Replicas


class SharedMetrics(Callback):
    """Gives every process the `trainer.callback_metrics` of the first, so that rules agree in all.

    Place it after the callbacks that log metrics, which the first process alone has.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ppo_view(pl_module).logs_headline = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int,
    ) -> None:  # fmt: skip
        self.share(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_evaluation(trainer):
            self.share(trainer)

    def share(self, trainer: Trainer) -> None:
        """Take the metrics of the first process for those of this one, unless this is it.

        `LightningModule.log` would take longer for all of them than a step of a small model.
        """
        found = self.replicas.first(
            lambda: {name: float(value) for name, value in trainer.callback_metrics.items()}
        )
        if not self.replicas.is_first:
            trainer.callback_metrics.update(
                {name: torch.tensor(value) for name, value in found.items()}
            )
