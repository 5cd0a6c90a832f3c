"""The batches of one stage, for `Trainer.fit`."""

from __future__ import annotations

import hashlib
import json
import marshal
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.types import Record
from lightning_rlhf.data.schedule import Schedule


class Example(Protocol):
    """Anything with a length."""

    @property
    def length(self) -> int:
        """Tokens."""


E = TypeVar("E", bound=Example)


class StageData(LightningDataModule, Generic[E]):
    """Tokenised examples as batches, in an order that an interrupted run takes up exactly.

    The whole run is one Lightning epoch: `Trainer(max_epochs=1)`. A checkpoint holds the number
    of batches trained on; a run resumed from it starts with the next one. The loaders have
    generators of their own, since a loader draws a number whenever it is iterated over: how often
    a run validates must not change what it samples.
    """

    def __init__(
        self,
        *,
        train: Sequence[E],
        val: Sequence[E],
        columns: Sequence[Mapping[str, Any]],
        collate: Callable[[list[E]], Record],
        batch_size: int,
        val_batch_size: int,
        batches: int,
        seed: int,
        pool_batches: int,
    ) -> None:
        """`batches` of `batch_size` examples are trained on; `pool_batches` as in Schedule.

        columns: what rewards and judges read of the rows besides the tokens; empty where there are
            none.
        """
        super().__init__()
        self.train = train
        self.val = val
        self.columns = columns
        self.collate = collate
        self.val_batch_size = val_batch_size
        self.schedule = Schedule(
            lengths=[example.length for example in train],
            batch_size=batch_size,
            batches=batches,
            seed=seed,
            pool_batches=pool_batches,
        )

    def train_dataloader(self) -> DataLoader[E]:
        """The batches from `schedule.start` on."""
        return DataLoader(
            self.train,  # type: ignore[arg-type]
            batch_sampler=self.schedule,
            collate_fn=self.collate,
            generator=torch.Generator(),
        )

    def val_dataloader(self) -> DataLoader[E]:
        """All validation examples, the longest first, so that too little memory shows at once."""
        ordered = sorted(self.val, key=lambda example: -example.length)
        return DataLoader(
            ordered,  # type: ignore[arg-type]
            batch_size=self.val_batch_size,
            collate_fn=self.collate,
            generator=torch.Generator(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, and what its order of batches depends on."""
        # Counted when training_step is through, unlike `completed`, which a checkpoint written
        # in on_train_batch_end finds one short.
        assert self.trainer is not None
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return {
            "batches_trained": progress.processed,  # type: ignore[attr-defined]
            "order": self._order(),
            "digests": self._digests,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start after the batches that were trained on.

        Raises:
            CheckpointError: the batches would come in another order than before, or be others.
        """
        missing = sorted({"batches_trained", "order", "digests"} - state_dict.keys())
        if missing:
            raise CheckpointError(
                f"cannot resume: the checkpoint does not say which data it is of ({missing} not in "
                "it); another version wrote it. Give overwrite=true to start anew"
            )
        if changed := differences(state_dict["order"], self._order()):
            raise CheckpointError(
                f"cannot resume: {'; '.join(changed)}. The order of the batches depends on it; "
                "resume with what the run started with, or start a new run"
            )
        if changed := differences(state_dict["digests"], self._digests):
            raise CheckpointError(
                "cannot resume: the data are others now, or in another order: "
                f"{'; '.join(changed)}. Resume with the data, the tokenizer and the template that "
                "the run started with, or start a new run"
            )
        self.schedule.start = state_dict["batches_trained"]

    def _order(self) -> dict[str, int]:
        return {
            "training examples": len(self.train),
            "batch size": self.schedule.batch_size,
            "seed": self.schedule.seed,
            "pool_batches": self.schedule.pool_batches,
        }

    @cached_property
    def _digests(self) -> dict[str, str]:
        return {
            "digest of the training examples": digest(self.train),
            "digest of the validation examples": digest(self.val),
            "digest of the columns that a reward reads": digest_columns(self.columns),
        }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Each key whose value is not what it was, in words."""
    return [
        f"{key} was {before.get(key)}, is {value}"
        for key, value in now.items()
        if before.get(key) != value
    ]


def digest(examples: Sequence[Any]) -> str:
    """Of dataclasses of numbers and of sequences of them, in their order: 16 characters."""
    found = hashlib.sha256()
    names = [field.name for field in fields(examples[0])] if examples else []
    for example in examples:
        # Version 2 writes types, lengths and values alone; later ones mark what is shared.
        found.update(marshal.dumps(attrgetter(*names)(example), 2))
    return found.hexdigest()[:16]


def digest_columns(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of the names and values of all rows, in their order: 16 characters.

    Of what JSON does not know, dates and pictures say, it is what they print as, less addresses.
    """

    def printed(value: Any) -> str:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))

    found = hashlib.sha256()
    for row in rows:
        found.update(json.dumps(row, default=printed).encode() + b"\n")
    return found.hexdigest()[:16]
