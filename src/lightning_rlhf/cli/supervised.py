"""What SFT and reward modelling have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_rlhf.cli.launch import Prepared
from lightning_rlhf.core.config import RMConfig, SFTConfig
from lightning_rlhf.core.types import Record
from lightning_rlhf.data.datamodule import StageData
from lightning_rlhf.data.lengths import Tokenised


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
        collate=partial(collate, pad_id=ready.chat.pad_token_id),
        batch_size=config.batch_size,
        val_batch_size=config.microbatch_size,
        batches=math.ceil(round(config.epochs * len(train.examples), 6) / config.batch_size),
        seed=ready.settings.seed,
        pool_batches=ready.settings.data.pool_batches,
    )
