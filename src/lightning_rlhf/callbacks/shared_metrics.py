"""The metrics of the first process, for the callbacks of the others."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rlhf.callbacks.contract import is_evaluation, ppo_view
from lightning_rlhf.parallel.replicas import Replicas


class SharedMetrics(Callback):
    """Logs in every process what the first one logged, so that rules decide the same in all.

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
        self.share(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_evaluation(trainer):
            self.share(trainer, pl_module)

    def share(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics of the first process here, unless this is it."""
        found = self.replicas.first(
            lambda: {name: float(value) for name, value in trainer.callback_metrics.items()}
        )
        if not self.replicas.is_first:
            pl_module.log_dict(found, logger=False)
