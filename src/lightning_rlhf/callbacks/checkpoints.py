"""The checkpoint that a run goes on from, by the stage's own clock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from lightning_rlhf.core.errors import RewardError


class ResumeCheckpoint(Callback):
    """Saves `path` each `every` batches, and where a reward source ends the run.

    A reward that cannot be had leaves the iteration unbegun: everything before it is kept.
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
            self.save(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        is_fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if isinstance(exception, RewardError) and is_fitting:
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Beside the target and then renamed."""
        beside = self.path.with_suffix(".tmp")
        trainer.save_checkpoint(beside)
        os.replace(beside, self.path)
