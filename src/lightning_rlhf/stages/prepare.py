"""The start of a stage: its tokenizer, its data as tokens, and the objects of the user's own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.batches import StageData
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.formats import Kind
from lightning_rlhf.data.lengths import Tokenised, tokenise
from lightning_rlhf.data.readers import Rows, TrainVal, sample
from lightning_rlhf.data.rows import Demonstration, Preference, Prompt
from lightning_rlhf.io.console import Working
from lightning_rlhf.models.checkpoint import Final
from lightning_rlhf.models.config import SFT
from lightning_rlhf.models.loading import load_tokenizer
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.parallel.replicas import Replicas, current
from lightning_rlhf.stages.accelerator import device_of
from lightning_rlhf.stages.console import print_lengths
from lightning_rlhf.stages.folder.changes import Export
from lightning_rlhf.stages.folder.folders import find_parents, folder_of
from lightning_rlhf.stages.objects import check_trainer, own_arguments, own_callbacks, own_loggers
from lightning_rlhf.stages.stage import Settings

R = TypeVar("R", Demonstration, Preference, Prompt)


@dataclass(frozen=True)
class Prepared:
    """Inputs that all stages have, checked."""

    settings: Settings
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    parents: Mapping[str, Final]
    """Role -> checkpoint that it is loaded from."""
    started: float
    """Time at which the stage started, by time.perf_counter()."""
    callbacks: list[Callback]
    """Callbacks of the user's own."""
    loggers: list[Logger]
    """Loggers of the user's own."""
    arguments: Mapping[str, Any]
    """Arguments of lightning.Trainer of the user's own, except callbacks."""
    export: Export | None = None
    """Folder to write instead of `final/`, from a checkpoint; None for a run."""

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""
        return folder_of(self.settings)

    @property
    def device(self) -> torch.device:
        """Return the device that the run computes on."""
        return device_of(self.settings)

    @property
    def replicas(self) -> Replicas:
        """Return the processes of the run."""
        return current(self.device)


@dataclass(frozen=True, kw_only=True)
class Training(ABC):
    """A stage before its first step, for `Trainer.fit(training.module, training.data)`."""

    ready: Prepared
    roles: Roles
    """Models that the module trains and reads."""
    module: L.LightningModule
    data: StageData

    @abstractmethod
    def save(self, metrics: Mapping[str, float]) -> Path:
        """Write `final/` with the trained model, and return its path.

        metrics: those that the manifest stores.
        """


def make_ready(settings: Settings, parents: Mapping[str, Final] | None = None) -> Prepared:
    """Load the tokenizer and its chat format; nothing is written yet.

    parents: role -> the checkpoint that the run starts from; None finds those that the stage reads.
    """
    parents = find_parents(settings) if parents is None else parents
    sft = parents.get(SFT)
    tokenizer = load_tokenizer(settings.model, sft.path if sft else None)
    chat = ChatFormat(tokenizer, settings.data.chat_template_kwargs)
    callbacks, loggers = own_callbacks(settings), own_loggers(settings)
    arguments = own_arguments(settings)
    check_trainer(settings.trainer, arguments)
    return Prepared(
        settings,
        tokenizer,
        chat,
        parents,
        started=time.perf_counter(),
        callbacks=callbacks,
        loggers=loggers,
        arguments=arguments,
    )


NOUNS: Mapping[Kind, str] = {
    "demonstrations": "demonstration",
    "preferences": "preference pair",
    "prompts": "prompt",
}
"""Kind of data -> noun for a row."""


def tokenised(ready: Prepared, rows: TrainVal[R]) -> tuple[Rows[R], Tokenised[Any], Tokenised[Any]]:
    """Return the validation rows, the training rows as tokens, and the validation rows as tokens.

    At most data.max_val_rows of the rows that fit are kept for validation. Prints the numbers.
    rows: the data that the stage reads.
    """
    data = ready.settings.data
    what = NOUNS[ready.settings.definition.data]
    with Working(f"tokenising the data ({len(rows.train) + len(rows.val):,} rows)"):
        train = tokenise(rows.train, ready.chat, data)
        val = tokenise(rows.val, ready.chat, data)
    held_out = rows.val
    if data.max_val_rows is not None and len(val.examples) > data.max_val_rows:
        fitting = set(val.numbers)
        fits = [i for i, number in enumerate(rows.val.numbers) if number in fitting]
        held_out = sample(rows.val.only(fits), data.max_val_rows, ready.settings.seed)
        val = replace(tokenise(held_out, ready.chat, data), dropped=val.dropped)
    print_lengths(what, rows.train, train)
    print_lengths(what, held_out, val, to_validate=True)
    return held_out, train, val
