"""lightning-rlhf replay of SFT, reward models and DPO: recomputes the batch at which a run ended.

Its rows are computed one by one with the weights of the checkpoint from the end of the run: updates
that are not finite are not made, so these are the weights with which the run computed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from rich import get_console
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_rlhf.callbacks.checkpoint_files import path_of
from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.config import SupervisedConfig
from lightning_rlhf.core.errors import CheckpointError, DataError
from lightning_rlhf.data.last_batch import (
    ROW_FACTS,
    TEXTS,
    LastBatch,
    last_batch_of,
    read_last_batch,
)
from lightning_rlhf.data.rollouts import machine
from lightning_rlhf.models.build_roles import start_from
from lightning_rlhf.models.roles import SFT
from lightning_rlhf.replay.plan import check_origin
from lightning_rlhf.replay.row_figures import not_finite_rows, replayed_rows, rows_on_terminal
from lightning_rlhf.replay.run_updates import check_tokens, quiet_trainer, same
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.folder.folders import CHECKPOINTS, find_sft
from lightning_rlhf.stages.launch import Prepared, make_ready
from lightning_rlhf.stages.stage import Settings
from lightning_rlhf.stages.supervised import COLLATE

NAMED = 3
"""Number of differences that are printed; the rest are counted."""


def plan_rows(folder: Path, settings: Settings, step: int | None) -> tuple[LastBatch, Path]:
    """Return the batch that the run in `folder` kept, and the checkpoint of the weights before it.

    step: required step of the batch; None for any.
    Raises DataError or CheckpointError where one is missing, or they do not belong together.
    """
    batch = read_last_batch(last_batch_of(folder))
    if batch.stage != settings.stage:
        raise DataError(
            f"{last_batch_of(folder)} is of stage={batch.stage}, the run of stage={settings.stage}"
        )
    if step not in (None, batch.step):
        raise DataError(
            f"step {step} of {folder} is not kept; the one that is kept is {batch.step}"
        )
    checkpoint = path_of(folder / CHECKPOINTS, batch.step - 1)
    if not checkpoint.is_file():
        raise CheckpointError(
            f"step {batch.step} of {folder} cannot be replayed: {checkpoint}, the weights that it "
            f"was to move, is not there; its rows and their losses stand in {last_batch_of(folder)}"
        )
    check_origin(folder, checkpoint, settings)
    return batch, checkpoint


def show_rows(batch: LastBatch, checkpoint: Path, settings: Settings, count: int) -> bool:
    """Compute the rows again and print them; return whether each agrees with the run's."""
    print_line(f"step {batch.step} once more, row by row, with the weights of {checkpoint}")
    module, ready, data = rebuilt(batch, settings, checkpoint.parents[1])
    trainer = quiet_trainer(settings, [])
    predicted = trainer.predict(
        module, DataLoader(data, batch_size=None), ckpt_path=checkpoint, weights_only=True
    )
    assert predicted is not None
    facts = {name: x.float().cpu() for name, x in vars(predicted[0]).items()}
    rows = replayed_rows(batch, facts, ready.chat.show)
    for part in rows_on_terminal(batch, rows, count):
        get_console().print(part)
    found = list(differences(batch, facts))
    parts = found[:NAMED] + [f"{len(found) - NAMED} more"] * (len(found) > NAMED)
    now = machine(ready.device)
    if found and now != batch.machine:
        parts.append(f"the run had {dict(batch.machine)}, here {now}")
    text = not_finite_rows(batch, rows)
    if found:
        text += f"; the run computed otherwise: {'; '.join(parts)}"
    elif batch.facts:
        text += "; the run computed the same numbers of each"
    print_line(text, "red" if found else "yellow")
    return not found


def rebuilt(
    batch: LastBatch, settings: Settings, folder: Path
) -> tuple[L.LightningModule, Prepared, Any]:
    """Return the module before its first step, its Prepared, and the batch in training form."""
    config = settings.config
    assert isinstance(config, SupervisedConfig)
    sft = find_sft(settings) if settings.definition.reads_sft else None
    ready = make_ready(settings, {} if sft is None else {SFT: sft})
    with Working("loading the model"):
        roles = start_from(
            settings.model, sft, trainable=config.finetune == "full", seed=settings.seed
        )
    ids = [token for row in batch.examples for name in TEXTS[batch.stage] for token in
           getattr(row, name)]  # fmt: skip
    check_tokens(last_batch_of(folder), torch.tensor(ids), roles)
    pad_id, examples = ready.chat.pad_token_id, cast(Any, batch.examples)
    assert settings.definition.build is not None
    module = settings.definition.build(ready, roles, config)
    return module, ready, [COLLATE[settings.definition.data](examples, pad_id)]


def differences(batch: LastBatch, facts: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield each difference, bit for bit, between a row and the run's numbers for it."""
    for name in ROW_FACTS[batch.stage]:
        if name in batch.facts:
            pairs = zip(facts[name].tolist(), batch.facts[name].tolist(), strict=True)
            for number, (now, then) in zip(batch.numbers, pairs, strict=True):
                if not same(now, then):
                    yield f"{name} of {batch.unit} {number} is {now!r}, was {then!r}"
