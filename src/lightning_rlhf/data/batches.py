"""Batches of one stage, the LightningDataModule of them, and collation, which alone pads.

Dimensions: B sequences, S and R tokens of whole sequences, P prompt tokens.
"""

import hashlib
import json
import marshal
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Int
from lightning import LightningDataModule
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

from lightning_rlhf.core.config import SupervisedConfig
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.records import Demonstrations, Labels, Preferences, Prompts, Record
from lightning_rlhf.data import lengths

_EPOCH, _POOL = 0, 1  # two independent streams of random numbers


class Schedule(Sampler[list[int]]):
    """Batch sampler for a whole run; batch k is a pure function of (seed, k).

    An endless sequence of epochs, each with all examples once in an order of its own, is cut into
    batches: batch k holds the positions k * batch_size to (k + 1) * batch_size. So every batch is
    full, no example is dropped, and a batch may span two epochs, or many if it is larger than the
    data.

    With `pool_batches` > 1, that many consecutive batches of an epoch pool their examples, which
    are sorted by length and divided into batches again; then all batches of the epoch are shuffled.
    A batch of similar lengths needs less padding than one of mixed lengths. 1 leaves the examples
    where they are. Batches that span two epochs are not pooled.
    """

    def __init__(
        self, *, lengths: Sequence[int], batch_size: int, batches: int, seed: int, pool_batches: int
    ) -> None:
        """Set up the schedule to start with batch 0.

        lengths: tokens of each example. batches: number of batches in the whole run. seed: >= 0.
        pool_batches: number of consecutive batches in a pool, >= 1.
        """
        self.lengths, self.batch_size, self.batches = np.asarray(lengths), batch_size, batches
        self.seed, self.pool_batches = seed, pool_batches
        self.start = 0
        """Index of the first batch to yield: 0, or the one after the last that was trained on."""
        self._latest: tuple[int, NDArray[np.int64]] = -1, np.array([], np.int64)

    def __len__(self) -> int:
        """Return the number of batches in the whole run, including those before `start`.

        Lightning counts the batches of a resumed run from the beginning.
        """
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        return (self.batch(k) for k in range(self.start, self.batches))

    def batch(self, k: int) -> list[int]:
        """Return the positions of the examples in batch k."""
        found: list[int] = []
        for place in range(k * self.batch_size, (k + 1) * self.batch_size):
            epoch, number = divmod(place, len(self.lengths))
            if self._latest[0] != epoch:
                self._latest = epoch, self._order(epoch)
            found.append(int(self._latest[1][number]))
        return found

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Return the positions of all examples in the order of this epoch."""
        order = np.random.default_rng((self.seed, _EPOCH, epoch)).permutation(len(self.lengths))
        start = -epoch * len(order) % self.batch_size  # after the previous epoch's last batch
        whole = (len(order) - start) // self.batch_size
        if self.pool_batches == 1 or whole < 1:
            return order
        inner = slice(start, start + whole * self.batch_size)
        pool = np.arange(whole * self.batch_size) // (self.pool_batches * self.batch_size)
        by_length = np.lexsort((self.lengths[order[inner]], pool))
        batches = order[inner][by_length].reshape(whole, self.batch_size)
        generator = np.random.default_rng((self.seed, _POOL, epoch))
        order[inner] = generator.permutation(batches).ravel()
        return order


class StageData(LightningDataModule):
    """Batches of tokenised examples, in an order that an interrupted run resumes exactly.

    The whole run is one Lightning epoch: `Trainer(max_epochs=1)`. A checkpoint stores the number of
    batches trained on, and a resumed run starts with the next one. Each loader has a generator of
    its own, since a DataLoader draws a random number whenever it is iterated over: how often a run
    validates must not change what it samples.
    """

    def __init__(
        self,
        *,
        train: Sequence[Any],
        val: Sequence[Any],
        columns: Sequence[Mapping[str, Any]],
        collate: Callable[[list[Any]], Record],
        val_batch_size: int,
        schedule: Schedule,
    ) -> None:
        """Store the examples and the schedule of the training batches.

        train, val: examples with their `length` in tokens. columns: rows with the values that
        rewards and judges read besides the tokens. collate: function from a list of examples to a
        batch.
        """
        super().__init__()
        self.train, self.val, self.columns = train, val, columns
        self.collate, self.val_batch_size, self.schedule = collate, val_batch_size, schedule

    @classmethod
    def of(
        cls, train: Sequence[Any], val: Sequence[Any], config: SupervisedConfig | PPOConfig,
        pad_id: int, *, seed: int = 0, pool_batches: int = 1,
        columns: Sequence[Mapping[str, Any]] = (),
    ) -> Self:  # fmt: skip
        """Return the batches of a run of a section: its `epochs` or `iterations`.

        Args:
            train, val: examples of one class of lengths.py, as `tokenise` returns them.
            pad_id: id of the padding token.
            seed, pool_batches: as for `Schedule`.
            columns: as for the class; empty where no reward reads any.
        """
        kind = type(train[0])
        if isinstance(config, PPOConfig):
            batch_size, batches = config.prompts_per_iteration, config.iterations
            val_rows = config.rollout_batch_size
        else:
            batch_size = config.batch_size
            batches = math.ceil(round(config.epochs * len(train), 6) / batch_size)
            # The KL of kto is one of a whole batch.
            val_rows = batch_size if kind is lengths.LabelTokens else config.microbatch_rows
        return cls(
            train=train, val=val, columns=columns, collate=partial(COLLATE[kind], pad_id=pad_id),
            val_batch_size=val_rows,
            schedule=Schedule(
                lengths=[example.length for example in train], batch_size=batch_size,
                batches=batches, seed=seed, pool_batches=pool_batches,
            ),
        )  # fmt: skip

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the training batches from `schedule.start` on."""
        return self._loader(self.train, batch_sampler=self.schedule)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the loader of all validation examples, longest first.

        In this order a lack of memory shows at the first batch.
        """
        ordered = sorted(self.val, key=lambda example: -example.length)
        return self._loader(ordered, batch_size=self.val_batch_size)

    def _loader(self, examples: Any, **options: Any) -> DataLoader[Any]:
        own = torch.Generator()
        return DataLoader(examples, collate_fn=self.collate, generator=own, **options)

    def further(self, number: int, count: int) -> Any:
        """Return the first `count` examples of batch `number` of those behind the run's last one.

        Like the others they are a function of (seed, number), which a resumed run draws again.
        """
        positions = self.schedule.batch(self.schedule.batches + number)[:count]
        return self.collate([self.train[i] for i in positions])

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches trained on and everything that their order depends on."""
        # `processed` counts a batch as soon as training_step returns; `completed` is still one
        # short when a checkpoint is written in on_train_batch_end.
        assert self.trainer is not None
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return {"batches_trained": progress.processed, "digests": self._facts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the schedule to start after the batches that were trained on.

        Raises CheckpointError where the data or the order of the batches differ from those of the
        interrupted run.
        """
        before = state_dict["digests"]
        if changed := [key for key, value in self._facts.items() if before.get(key) != value]:
            changes = "; ".join(f"{k} was {before.get(k)}, is {self._facts[k]}" for k in changed)
            raise CheckpointError(
                f"cannot resume: {changes}. The batches depend on it; resume with the data, the "
                "tokenizer, the template and the order of the start, or start a new run"
            )
        self.schedule.start = state_dict["batches_trained"]

    @cached_property
    def _facts(self) -> dict[str, int | str]:
        """Return what the batches and their order depend on."""
        return {
            "training examples": len(self.train),
            "batch size": self.schedule.batch_size,
            "seed": self.schedule.seed,
            "pool_batches": self.schedule.pool_batches,
            "digest of the training examples": digest_examples(self.train),
            "digest of the validation examples": digest_examples(self.val),
            "digest of the columns that a reward reads": digest_columns(self.columns),
        }


def digest_examples(examples: Sequence[Any]) -> str:
    """Return a digest of the examples in their order, 16 hexadecimal digits.

    examples: dataclasses whose fields are numbers and sequences of numbers.
    """
    values = attrgetter(*(field.name for field in fields(examples[0]))) if examples else None
    # Format 2 writes types, lengths and values only; later formats also mark shared objects.
    return _digest(marshal.dumps(values(example), 2) for example in examples if values)


def digest_columns(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of the names and values of all rows in their order, 16 hexadecimal digits.

    A value that JSON cannot represent, such as a date or an image, enters as its `repr` without
    memory addresses.
    """

    def shown(value: Any) -> str:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))

    return _digest(json.dumps(row, default=shown).encode() + b"\n" for row in rows)


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def collate_demonstrations(
    examples: Sequence[lengths.DemonstrationTokens], pad_id: int
) -> Demonstrations:
    """Return demonstrations right-padded to the longest [B,S].

    Their targets are the responses, and the learned tokens of the prompts of dialogues.
    """
    tokens, mask = pad([[*e.prompt, *e.response] for e in examples], pad_id, "right")
    prompt_lengths = torch.tensor([len(e.prompt) for e in examples])
    target_mask = mask & (torch.arange(tokens.shape[1]) >= prompt_lengths[:, None])
    for row, example in enumerate(examples):
        target_mask[row, list(example.learned)] = True
    return Demonstrations(tokens=tokens, mask=mask, target_mask=target_mask)


def collate_preferences(examples: Sequence[lengths.PreferenceTokens], pad_id: int) -> Preferences:
    """Return preference pairs, each side right-padded to its longest sequence: [B,S] and [B,R]."""
    chosen, chosen_mask = pad([[*e.prompt, *e.chosen] for e in examples], pad_id, "right")
    rejected, rejected_mask = pad([[*e.prompt, *e.rejected] for e in examples], pad_id, "right")
    return Preferences(
        chosen=chosen, chosen_mask=chosen_mask, rejected=rejected, rejected_mask=rejected_mask,
        prompt_tokens=torch.tensor([len(e.prompt) for e in examples]),
        margin=torch.tensor([e.margin for e in examples]),
    )  # fmt: skip


def collate_labels(examples: Sequence[lengths.LabelTokens], pad_id: int) -> Labels:
    """Return responses with labels, right-padded [B,S], and the prompts with others [B,R]: each
    with the response half a batch further."""
    half = len(examples) // 2
    pairs = zip(examples, (*examples[half:], *examples[:half]), strict=True)
    mixed = [lengths.DemonstrationTokens(one.prompt, other.response) for one, other in pairs]
    others = collate_demonstrations(mixed, pad_id)
    return Labels(
        **vars(collate_demonstrations(examples, pad_id)),
        label=torch.tensor([e.label for e in examples]),
        other_tokens=others.tokens,
        other_target_mask=others.target_mask,
    )


def collate_prompts(examples: Sequence[lengths.PromptTokens], pad_id: int) -> Prompts:
    """Return prompts left-padded to the longest [B,P]."""
    tokens, mask = pad([e.prompt for e in examples], pad_id, "left")
    return Prompts(tokens=tokens, mask=mask, index=torch.tensor([e.index for e in examples]))


COLLATE: Mapping[type, Callable[..., Record]] = {
    lengths.DemonstrationTokens: collate_demonstrations,
    lengths.PreferenceTokens: collate_preferences,
    lengths.LabelTokens: collate_labels,
    lengths.PromptTokens: collate_prompts,
}
"""Class of examples -> (examples, id of the padding token) -> batch."""


def pad(
    rows: Sequence[Sequence[int]], pad_id: int, side: Literal["left", "right"]
) -> tuple[Int[torch.Tensor, "B S"], Bool[torch.Tensor, "B S"]]:
    """Return the rows padded to the longest, and the mask that is True on real tokens."""
    tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
    real = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    padded = partial(pad_sequence, batch_first=True, padding_side=side)
    return padded(tokens, padding_value=pad_id), padded(real, padding_value=False)
