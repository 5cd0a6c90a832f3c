"""What SFT and reward modelling have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lightning_rlhf.callbacks.last_batch import KeepLastBatch
from lightning_rlhf.core.config import RMConfig, SFTConfig
from lightning_rlhf.core.errors import NotFiniteError, require
from lightning_rlhf.core.types import Record
from lightning_rlhf.data.datamodule import StageData
from lightning_rlhf.data.last_batch import Kind
from lightning_rlhf.data.lengths import Tokenised
from lightning_rlhf.data.readers import Rows
from lightning_rlhf.stages.launch import AtEnd, Prepared, fit


def supervised_data(
    ready: Prepared,
    config: SFTConfig | RMConfig,
    train: Tokenised[Any],
    val: Tokenised[Any],
    collate: Callable[..., Record],
) -> StageData[Any]:
    """Batches of alike lengths over `config.epochs` passes."""
    return StageData(
        train=train.examples,
        val=val.examples,
        columns=(),
        collate=partial(collate, pad_id=ready.chat.pad_token_id),
        batch_size=config.batch_size,
        val_batch_size=config.microbatch_size,
        batches=batches(ready.settings.stage, config, len(train.examples)),
        seed=ready.settings.seed,
        pool_batches=ready.settings.data.pool_batches,
    )


def batches(stage: str, config: SFTConfig | RMConfig, examples: int) -> int:
    """Return how many batches `config.epochs` passes over the examples are, the last one filled up.

    Raises ConfigError where they are none.
    """
    count = math.ceil(round(config.epochs * examples, 6) / config.batch_size)
    require(count > 0, f"{stage}.epochs", config.epochs,
            f"a number >= {1 / examples:.6g}, which is 1 of the {examples} examples")  # fmt: skip
    return count


def fit_supervised(
    ready: Prepared,
    stage: Kind,
    module: L.LightningModule,
    data: StageData[Any],
    rows: Rows[Any],
    train: Tokenised[Any],
    metrics: Callback,
    at_end: AtEnd | None = None,
) -> dict[str, float]:
    """As `fit`; a batch that no update can be made of is kept.

    rows: that are trained on; train: the same as tokens.
    Raises NotFiniteError, which names the file.
    """
    keeper = KeepLastBatch(ready.folder, stage, rows, train, data, ready.chat)
    try:
        return fit(ready, module, data, [metrics, keeper], at_end)
    except NotFiniteError as error:
        if not keeper.is_kept:
            raise
        raise NotFiniteError(
            f"{error}. The batch of the last one is kept in {keeper.path}, and `lightning-rlhf "
            f"replay {ready.folder}` shows its rows"
        ) from error
