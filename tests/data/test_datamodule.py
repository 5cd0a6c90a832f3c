"""A run that is interrupted and resumed sees the batches of one that was not."""

from __future__ import annotations

import contextlib
from array import array
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.records import Prompts
from lightning_rlhf.data.batches import StageData, collate_prompts, digest_columns, digest_examples
from lightning_rlhf.data.lengths import PreferenceTokens, PromptTokens

BATCHES = 11  # of 4 of 10 examples: 4.4 epochs
COLUMNS = [{"prompt": "a", "answer": 4}, {"prompt": "b", "answer": 5}]
EXAMPLES = [PromptTokens([1] * (i % 4 + 1), i) for i in range(10)]


class Recorder(LightningModule):
    """Notes which examples it was given; `updates` optimizer steps a batch, 0 = automatic."""

    def __init__(self, updates: int, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.automatic_optimization = updates == 0
        self.updates = updates
        self.fail_at = fail_at
        self.seen: list[list[int]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: Prompts, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fail_at:
            raise KeyboardInterrupt
        self.seen.append(batch.index.tolist())
        optimizer: Any = self.optimizers()
        for _ in range(self.updates):
            loss = (self.weight**2).sum()
            self.manual_backward(loss)
            optimizer.step()
        return (self.weight**2).sum()

    def validation_step(self, batch: Prompts, batch_idx: int) -> None:
        self.validated.append(batch.mask.sum(dim=1).tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(Callback):
    """Saves after batch `last` and interrupts there; or where the run fails."""

    def __init__(self, path: Path, last: int | None) -> None:
        self.path, self.last = path, last

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if args[-1] == self.last:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt

    def on_exception(self, trainer: Trainer, *args: Any) -> None:
        if not self.path.exists():
            trainer.save_checkpoint(self.path)


def stage_data(**changes: Any) -> StageData:
    values: dict[str, Any] = {
        "train": EXAMPLES,
        "val": EXAMPLES[:5],
        "columns": COLUMNS,
        "collate": partial(collate_prompts, pad_id=0),
        "batch_size": 4,
        "val_batch_size": 2,
        "batches": BATCHES,
        "seed": 3,
        "pool_batches": 2,
    }
    return StageData(**(values | changes))


def fit(
    module: Recorder,
    data: StageData,
    *callbacks: Callback,
    resume: Path | None = None,
) -> Recorder:
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=3,
        callbacks=list(callbacks),
    )
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(module, data, ckpt_path=resume)
    return module


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]


@pytest.mark.parametrize("updates", [0, 3])
def test_an_uninterrupted_run_is_the_schedule(updates: int) -> None:
    data = stage_data()
    module = fit(Recorder(updates), data)
    assert module.seen == [data.schedule.batch(k) for k in range(BATCHES)]


@pytest.mark.parametrize(("updates", "last"), [(0, 2), (3, 0), (3, BATCHES - 1)])
def test_resuming_after_a_batch(updates: int, last: int, tmp_path: Path) -> None:
    whole = fit(Recorder(updates), stage_data()).seen
    path = tmp_path / "last.ckpt"
    before = fit(Recorder(updates), stage_data(), SaveAt(path, last)).seen
    assert before == whole[: last + 1]
    after = fit(Recorder(updates), stage_data(), resume=path).seen
    assert after == whole[last + 1 :]


def test_resuming_within_a_batch_repeats_it_and_resuming_twice(tmp_path: Path) -> None:
    whole = fit(Recorder(3), stage_data()).seen
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    assert fit(Recorder(3, fail_at=3), stage_data(), SaveAt(first, None)).seen == whole[:3]
    between = fit(Recorder(3), stage_data(), SaveAt(second, 7), resume=first).seen
    assert between == whole[3:8]
    assert fit(Recorder(3), stage_data(), resume=second).seen == whole[8:]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint after batch 2."""
    path = tmp_path_factory.mktemp("interrupted") / "last.ckpt"
    fit(Recorder(3), stage_data(), SaveAt(path, 2))
    return path


DIGEST = "digest of the"


@pytest.mark.parametrize(("changes", "told"), [
    ({"seed": 4}, "seed was 3, is 4"),
    ({"batch_size": 5}, "batch size was 4, is 5"),
    ({"pool_batches": 1}, "pool_batches was 2, is 1"),
    ({"train": EXAMPLES[:9]}, "training examples was 10, is 9"),
    # As many in another order, of the same lengths, of another row of the data.
    ({"train": EXAMPLES[::-1]}, f"{DIGEST} training examples was "),
    ({"train": [PromptTokens([2], 0), *EXAMPLES[1:]]}, f"{DIGEST} training examples was "),
    ({"train": [*EXAMPLES[:-1], PromptTokens(EXAMPLES[-1].prompt, 10)]}, "training examples was "),
    ({"val": [*EXAMPLES[:4], PromptTokens([2], 4)]}, f"{DIGEST} validation examples was "),
    ({"columns": COLUMNS[::-1]}, f"{DIGEST} columns that a reward reads was "),
    ({"columns": [COLUMNS[0], {"prompt": "b", "reply": 5}]}, "columns that a reward reads was "),
])  # fmt: skip
def test_other_data_or_another_order_is_refused(
    changes: dict[str, Any], told: str, interrupted: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        fit(Recorder(3), stage_data(**changes), resume=interrupted)
    assert str(caught.value).startswith("cannot resume: ")
    assert told in str(caught.value)


def test_columns_have_one_digest_whatever_is_in_them() -> None:
    """A picture of a hub data set prints the address at which it is."""
    day, picture = datetime(2020, 1, 2, tzinfo=UTC), type("Picture", (), {})
    one, same = ([{"day": day, "raw": b"1", "picture": picture()}] for _ in range(2))
    assert digest_columns(one) == digest_columns(same)
    for name, value in (("day", day.replace(day=3)), ("raw", b"2"), ("picture", None)):
        assert digest_columns([one[0] | {name: value}]) != digest_columns(one)


def test_a_digest_is_of_every_number_and_of_where_a_sequence_ends() -> None:
    pairs = [PreferenceTokens(array("i", [1]), array("i", [2, 3]), array("i", [4]), 0.5)]
    same = PreferenceTokens(array("i", [1]), array("i", [2, 3]), array("i", [4]), 0.5)
    # in another process too
    assert digest_examples(pairs) == digest_examples([same]) == "48bceac68b69a5e1"
    others = [
        replace(same, prompt=array("i", [2])),
        replace(same, rejected=array("i", [5])),
        replace(same, margin=0.25),
    ]
    assert len({digest_examples([other]) for other in (same, *others)}) == 4
    ends = [[array("i", [1, 2]), array("i", [3])], [array("i", [1]), array("i", [2, 3])]]
    assert len({digest_examples([PromptTokens(p, 0) for p in prompts]) for prompts in ends}) == 2


def test_validation_goes_from_long_to_short() -> None:
    # Lengths 1 2 3 4 1, in batches of 2.
    module = fit(Recorder(3), stage_data(batches=3))
    assert module.validated == [[4, 3], [2, 1], [1]]


def test_loading_batches_draws_no_random_number_of_the_run() -> None:
    data = stage_data()
    before = torch.get_rng_state()
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert len(list(loader)) > 0
    assert torch.equal(torch.get_rng_state(), before)
