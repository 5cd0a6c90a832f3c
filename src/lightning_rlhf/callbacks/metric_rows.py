"""metrics.csv and the event files of TensorBoard in step with the checkpoints of a run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rlhf.callbacks.contract import position
from lightning_rlhf.callbacks.loggers import RunTensorBoard
from lightning_rlhf.callbacks.metrics_file import MetricsFile


class Rows(Callback):
    """Removes the rows after the checkpoint that a run goes on from, and puts them on the disk
    before a checkpoint is written. For a module that logs its metrics with `self.log`."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile | RunTensorBoard):
                logger.rewind(position(trainer, pl_module))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile | RunTensorBoard):
                logger.flush()
