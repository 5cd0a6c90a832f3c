"""Base class of the stages that make passes over rows: SFT, reward modelling, DPO."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback

from lightning_rlhf.callbacks.metrics import StepMetrics
from lightning_rlhf.callbacks.recorder import KeepLastBatch
from lightning_rlhf.core.config import SupervisedConfig
from lightning_rlhf.core.errors import require
from lightning_rlhf.core.records import Record
from lightning_rlhf.data.batches import StageData, collate_demonstrations, collate_preferences
from lightning_rlhf.data.lengths import Tokenised
from lightning_rlhf.data.readers import TrainVal
from lightning_rlhf.models.build_roles import add_policy, check_positions
from lightning_rlhf.models.config import POLICY
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.stage import Stage
from lightning_rlhf.stages.model_card import hand_over

COLLATE: Mapping[str, Callable[..., Record]] = {
    "demonstrations": collate_demonstrations,
    "preferences": collate_preferences,
}
"""Kind of data -> (examples, id of the padding token) -> batch."""
LONGEST = {
    "demonstrations": "the longest demonstration",
    "preferences": "the longest prompt of a preference with its response",
}
"""Kind of data -> description of its longest row."""


class Supervised(Stage):
    """A stage whose section is a SupervisedConfig: `epochs` passes over its rows.

    `add_roles` and `module_class` are what such a stage has of its own.
    """

    module_class: ClassVar[type[Any]]
    """Class of the module: (roles, config, replicas) -> module."""
    metrics: ClassVar[type[Any]] = StepMetrics
    """Callback that logs the metrics of the module's steps."""
    role: ClassVar[str] = POLICY
    """Role that is trained, and handed over."""

    def build(self, run: Run) -> tuple[LightningModule, StageData, list[Callback]]:
        rows = run.rows(self.data)
        train, data = self.read(run, rows)
        roles = self.load(run)
        check_positions(roles, max(e.length for e in train.examples), LONGEST[self.data])
        module = self.make_module(run, roles)
        return module, data, self.callbacks(run, rows, train, data)

    def restore(self, run: Run) -> LightningModule:
        return self.make_module(run, self.load(run).to(run.device))

    def finish(self, run: Run, module: Any, metrics: Mapping[str, float]) -> Path:
        return hand_over(run, module.roles, self.role, metrics, head=None)

    def read(self, run: Run, rows: TrainVal[Any]) -> tuple[Tokenised[Any], StageData]:
        """Return the training rows as tokens, and batches of rows of similar length."""
        config, settings = run.settings.config, run.settings
        self.held_out, train, val = run.tokenised(rows)
        return train, StageData(
            train=train.examples,
            val=val.examples,
            columns=(),
            collate=partial(COLLATE[self.data], pad_id=run.chat.pad_token_id),
            batch_size=config.batch_size,
            val_batch_size=config.microbatch_size,
            batches=batches(self.name, config, len(train.examples)),
            seed=settings.seed,
            pool_batches=settings.data.pool_batches,
        )

    def load(self, run: Run) -> Roles:
        """Return the model that the stage starts from."""
        return run.load_model(trainable=run.settings.config.finetune == "full")

    def add_roles(self, run: Run, roles: Roles) -> None:
        """Add what is trained to the model: here a new policy, equal to the SFT model."""
        add_policy(roles, run.settings.model, run.settings.seed)

    def make_module(self, run: Run, roles: Roles) -> LightningModule:
        """Return the module before its first step."""
        self.add_roles(run, roles)
        module: LightningModule = self.module_class(roles, run.settings.config, run.replicas)
        return module

    def callbacks(
        self, run: Run, rows: TrainVal[Any], train: Tokenised[Any], data: StageData
    ) -> list[Callback]:
        """Return the metrics of the steps, and what keeps a batch that no update can be made of."""
        return [self.metrics(), KeepLastBatch(run.folder, rows.train, train, data, run.chat)]


def batches(stage: str, config: SupervisedConfig, examples: int) -> int:
    """Return the number of batches in `config.epochs` passes over the examples, rounded up.

    Raises ConfigError where it is 0.
    """
    count = math.ceil(round(config.epochs * examples, 6) / config.batch_size)
    require(count > 0, f"{stage}.epochs", config.epochs,
            f"a number >= {1 / examples:.6g}, which is 1 of the {examples} examples")  # fmt: skip
    return count
