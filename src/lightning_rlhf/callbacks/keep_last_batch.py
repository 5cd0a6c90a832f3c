"""Dump of the batch at which SFT, reward modelling or DPO stopped because of non-finite updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_rlhf.callbacks.terminal import print_line
from lightning_rlhf.core.errors import NotFiniteError, StorageError
from lightning_rlhf.core.record import Record
from lightning_rlhf.core.results import PairRows, SFTRows
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.datamodule import StageData
from lightning_rlhf.data.last_batch import Kind, LastBatch, last_batch_of, write_last_batch
from lightning_rlhf.data.lengths import Tokenised
from lightning_rlhf.data.readers import Rows
from lightning_rlhf.data.rollouts import machine


class SupervisedView(Protocol):
    """The attributes of a module of these stages that this callback reads."""

    iteration: int
    """Number of finished batches, over all resumes."""

    def predict_step(self, batch: Any, batch_idx: int) -> SFTRows | PairRows: ...


class KeepLastBatch(Callback):
    """Callback that writes the batch of the last update when non-finite updates end the run.

    The weights before that update are in the checkpoint that is written when the run ends. A
    resumed run deletes the file, since it trains on that batch again.
    """

    def __init__(
        self,
        run_dir: Path,
        stage: Kind,
        rows: Rows[Any],
        tokenised: Tokenised[Any],
        data: StageData,
        chat: ChatFormat,
    ) -> None:
        """Store the sources of the batch.

        run_dir: folder of the run, where the file is written.
        rows, tokenised, data: the training data as rows, as tokens and as batches.
        chat: chat format, which decodes tokens.
        """
        self.path = last_batch_of(run_dir)
        self.stage = stage
        self.rows = rows
        self.tokenised = tokenised
        self.data = data
        self.chat = chat
        self.is_kept = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.path.unlink(missing_ok=True)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if not isinstance(exception, NotFiniteError):
            return
        try:
            write_last_batch(self.path, self.latest(trainer, pl_module), self.chat.show)
        except StorageError as failure:  # must not replace the exception that ended the run
            print_line(f"the batch of the last update is not kept: {failure}")
        else:
            self.is_kept = True

    def latest(self, trainer: Trainer, pl_module: LightningModule) -> LastBatch:
        """Return the current training batch, with the module's outputs for each of its rows."""
        finished = cast(SupervisedView, pl_module).iteration
        positions = self.data.schedule.batch(finished)
        examples = [self.data.train[i] for i in positions]
        batch = self.data.collate(examples).to(pl_module.device)
        return LastBatch(
            stage=self.stage,
            step=finished + 1,
            source=self.rows.source,
            unit=self.rows.unit,
            numbers=[self.tokenised.numbers[i] for i in positions],
            examples=examples,
            facts=facts(trainer, pl_module, batch),
            machine=machine(pl_module.device),
        )


def facts(trainer: Trainer, pl_module: LightningModule, batch: Record) -> dict[str, Tensor]:
    """Return the module's outputs for each row, computed as in training; {} where that fails."""
    try:
        with trainer.precision_plugin.forward_context():
            return vars(cast(SupervisedView, pl_module).predict_step(batch, 0))
    except Exception as failure:  # the batch itself is still written
        print_line(f"no loss of single rows beside the batch that is kept: {failure}")
        return {}
