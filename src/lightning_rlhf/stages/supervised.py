"""Data and training steps shared by SFT, reward modelling and DPO."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import Callback

from lightning_rlhf.callbacks.recorder import KeepLastBatch
from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.config import SupervisedConfig
from lightning_rlhf.core.errors import require
from lightning_rlhf.core.record import Record
from lightning_rlhf.data.collate import collate_demonstrations, collate_preferences
from lightning_rlhf.data.datamodule import StageData
from lightning_rlhf.data.lengths import Tokenised
from lightning_rlhf.data.readers import Rows, load
from lightning_rlhf.stages.launch import AtEnd, Prepared, Training, fit, tokenised

COLLATE: Mapping[str, Callable[..., Record]] = {
    "demonstrations": collate_demonstrations,
    "preferences": collate_preferences,
}
"""Kind of data -> (examples, id of the padding token) -> batch."""


def read_batches(ready: Prepared) -> StageData:
    """Return the batches for a stage whose section is a SupervisedConfig.

    Raises ConfigError or DataError where the data cannot be read.
    """
    settings = ready.settings
    with Working("reading the data"):
        rows = load(settings.definition.data, settings.data, settings.seed)
    _, train, val = tokenised(ready, rows)
    return supervised_data(ready, settings.config, train, val)


def supervised_data(
    ready: Prepared,
    config: SupervisedConfig,
    train: Tokenised[Any],
    val: Tokenised[Any],
) -> StageData:
    """Return batches of rows of similar length, over `config.epochs` passes."""
    return StageData(
        train=train.examples,
        val=val.examples,
        columns=(),
        collate=partial(COLLATE[ready.settings.definition.data], pad_id=ready.chat.pad_token_id),
        batch_size=config.batch_size,
        val_batch_size=config.microbatch_size,
        batches=batches(ready.settings.stage, config, len(train.examples)),
        seed=ready.settings.seed,
        pool_batches=ready.settings.data.pool_batches,
    )


def batches(stage: str, config: SupervisedConfig, examples: int) -> int:
    """Return the number of batches in `config.epochs` passes over the examples, rounded up.

    Raises ConfigError where it is 0.
    """
    count = math.ceil(round(config.epochs * examples, 6) / config.batch_size)
    require(count > 0, f"{stage}.epochs", config.epochs,
            f"a number >= {1 / examples:.6g}, which is 1 of the {examples} examples")  # fmt: skip
    return count


@dataclass(frozen=True, kw_only=True)
class SupervisedTraining(Training):
    """SFT, reward modelling or DPO before the first step."""

    rows: Rows[Any]
    """Rows that are trained on."""
    train: Tokenised[Any]
    """Tokens of the rows that are trained on."""


def fit_supervised(
    training: SupervisedTraining, metrics: Callback, at_end: AtEnd | None = None
) -> dict[str, float]:
    """Train as `fit` does; keep the batch that no update can be made of.

    Raises NotFiniteError, which names the file.
    """
    ready, data = training.ready, training.data
    keeper = KeepLastBatch(ready.folder, training.rows, training.train, data, ready.chat)
    return fit(ready, training.module, data, [metrics, keeper], at_end)
