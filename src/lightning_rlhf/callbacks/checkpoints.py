"""The checkpoint that a run goes on from, by the stage's own clock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback


class ResumeCheckpoint(Callback):
    """Saves `path` each `every` batches, beside the target and then renamed.

    Lightning's ModelCheckpoint counts optimizer steps, of which PPO takes several a batch.
    """

    def __init__(self, path: Path, every: int) -> None:
        self.path = path
        self.every = every

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any,
        batch_idx: int,
    ) -> None:  # fmt: skip
        if (batch_idx + 1) % self.every == 0:
            beside = self.path.with_suffix(".tmp")
            trainer.save_checkpoint(beside)
            os.replace(beside, self.path)
