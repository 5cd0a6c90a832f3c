"""Batches: their order, which an interrupted run resumes, and their padding and masks."""

import contextlib
from array import array
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Callback, LightningModule, Trainer

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.records import Prompts
from lightning_rlhf.data.batches import (
    Schedule,
    StageData,
    collate_demonstrations,
    collate_preferences,
    collate_prompts,
    digest_columns,
    digest_examples,
)
from lightning_rlhf.data.lengths import DemonstrationTokens, PreferenceTokens, PromptTokens

BATCHES = 11  # of 4 of 10 examples: 4.4 epochs
COLUMNS = [{"prompt": "a", "answer": 4}, {"prompt": "b", "answer": 5}]
EXAMPLES = [PromptTokens([1] * (i % 4 + 1), i) for i in range(10)]


class Recorder(LightningModule):
    """Notes which examples it was given; `updates` optimizer steps a batch, 0 = automatic."""

    def __init__(self, updates: int, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.automatic_optimization = updates == 0
        self.updates, self.fail_at = updates, fail_at
        self.seen, self.validated = list[list[int]](), list[list[int]]()

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
    values: dict[str, Any] = {"train": EXAMPLES, "val": EXAMPLES[:5], "columns": COLUMNS}
    values |= {"collate": partial(collate_prompts, pad_id=0), "val_batch_size": 2}
    order = {"batches": BATCHES, "seed": 3, "pool_batches": 2}
    order |= {key: changes.pop(key) for key in (*order,) if key in changes}
    values |= changes
    lengths = [example.length for example in values["train"]]
    return StageData(**values, schedule=schedule(lengths, 4, **order))


def fit(
    module: Recorder, data: StageData, *callbacks: Callback, resume: Path | None = None
) -> Recorder:
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options: dict[str, Any] = {"num_sanity_val_steps": 0, "val_check_interval": 3}
    options |= {"max_epochs": 1, "accelerator": "cpu", **dict.fromkeys(silent, False)}
    trainer = Trainer(callbacks=list(callbacks), **options)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(module, data, ckpt_path=resume)
    return module


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]


@pytest.mark.parametrize(("updates", "last"), [(0, 2), (3, BATCHES - 1)])
def test_resuming_after_a_batch(updates: int, last: int, tmp_path: Path) -> None:
    path, schedule = tmp_path / "last.ckpt", stage_data().schedule
    whole = fit(Recorder(updates), stage_data()).seen
    assert whole == [schedule.batch(k) for k in range(BATCHES)]
    assert fit(Recorder(updates), stage_data(), SaveAt(path, last)).seen == whole[: last + 1]
    assert fit(Recorder(updates), stage_data(), resume=path).seen == whole[last + 1 :]


def test_resuming_within_a_batch_repeats_it_and_resuming_twice(tmp_path: Path) -> None:
    whole = [stage_data().schedule.batch(k) for k in range(BATCHES)]
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


@pytest.mark.parametrize(("changes", "message"), [
    ({"seed": 4, "pool_batches": 1}, "seed was 3, is 4; pool_batches was 2, is 1"),
    ({"train": EXAMPLES[:9]}, "training examples was 10, is 9"),
    # As many in another order, of the same lengths, of another row of the data.
    ({"train": EXAMPLES[::-1]}, f"{DIGEST} training examples was "),
    ({"train": [*EXAMPLES[:-1], PromptTokens(EXAMPLES[-1].prompt, 10)]}, "training examples was "),
    ({"val": [*EXAMPLES[:4], PromptTokens([2], 4)]}, f"{DIGEST} validation examples was "),
    ({"columns": [COLUMNS[0], {"prompt": "b", "reply": 5}]}, "columns that a reward reads was "),
])  # fmt: skip
def test_other_data_or_another_order_is_refused(
    changes: dict[str, Any], message: str, interrupted: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        fit(Recorder(3), stage_data(**changes), resume=interrupted)
    assert str(caught.value).startswith("cannot resume: ")
    assert message in str(caught.value)


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
    changes = ({"prompt": array("i", [2])}, {"rejected": array("i", [5])}, {"margin": 0.25}, {})
    assert len({digest_examples([replace(same, **change)]) for change in changes}) == 4
    ends = [[array("i", [1, 2]), array("i", [3])], [array("i", [1]), array("i", [2, 3])]]
    assert len({digest_examples([PromptTokens(p, 0) for p in prompts]) for prompts in ends}) == 2


def test_validation_goes_from_long_to_short() -> None:
    # Lengths 1 2 3 4 1, in batches of 2.
    module = fit(Recorder(3), stage_data(batches=3))
    assert module.validated == [[4, 3], [2, 1], [1]]


def schedule(
    lengths: list[int], batch_size: int, *, batches: int = 8, seed: int = 0, pool_batches: int = 1
) -> Schedule:
    order = {"batches": batches, "seed": seed, "pool_batches": pool_batches}
    return Schedule(lengths=lengths, batch_size=batch_size, **order)


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40)
SIZES = st.integers(1, 20)
POOLS = st.integers(1, 6)
SEEDS = st.integers(0, 2**32)


@settings(deadline=None)
@given(LENGTHS, SIZES, SEEDS, POOLS, st.integers(0, 12), st.data())
def test_any_start_gives_the_tail_of_the_whole_run(
    lengths: list[int], size: int, seed: int, pool: int, batches: int, data: st.DataObject
) -> None:
    whole = list(schedule(lengths, size, batches=batches, seed=seed, pool_batches=pool))
    start = data.draw(st.integers(0, batches))
    resumed = schedule(lengths, size, batches=batches, seed=seed, pool_batches=pool)
    resumed.start = start
    assert list(resumed) == list(resumed) == whole[start:]  # iterating changes nothing
    longer = schedule(lengths, size, batches=batches + 3, seed=seed, pool_batches=pool)
    assert list(longer)[:batches] == whole
    assert len(resumed) == len(whole) == batches


@settings(deadline=None)
@given(LENGTHS, SIZES, SEEDS, POOLS)
def test_every_epoch_is_each_example_once(
    lengths: list[int], size: int, seed: int, pool: int
) -> None:
    rows = len(lengths)
    batches = list(schedule(lengths, size, batches=3 * rows, seed=seed, pool_batches=pool))
    assert all(len(batch) == size for batch in batches)
    stream = [example for batch in batches for example in batch]
    for epoch in range(3):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_epochs_and_seeds_differ_in_order() -> None:
    # Two random orders of 50 are equal with probability 1 / 50!.
    first, second = schedule([1] * 50, 50, batches=2)
    (other,) = schedule([1] * 50, 50, batches=1, seed=1)
    assert len({*map(tuple, (first, second, other, sorted(first)))}) == 4


def test_pools_batch_alike_lengths_and_mix_their_order() -> None:
    # One pool is the whole epoch: 8 batches, the shortest 8 of 64 together, and so on.
    lengths = [64 - i for i in range(64)]
    batches = list(schedule(lengths, 8, pool_batches=8))
    shortest = [min(lengths[e] for e in batch) for batch in batches]
    assert sorted(shortest) == [1, 9, 17, 25, 33, 41, 49, 57]
    assert all(
        sorted(lengths[e] - min(lengths[e] for e in b) for e in b) == list(range(8))
        for b in batches
    )
    assert shortest not in (sorted(shortest), sorted(shortest, reverse=True))


def test_batches_on_the_border_of_two_epochs_stay_as_they_come() -> None:
    # Epochs of 10 in batches of 4: batch 2 holds places 8 to 12, of both epochs; batches 3 and 4
    # are the inside of the second epoch, sorted and cut anew.
    lengths = list(range(10))
    pooled, plain = (list(schedule(lengths, 4, batches=5, pool_batches=p)) for p in (9, 1))
    assert pooled[2] == plain[2]
    assert {*pooled[3], *pooled[4]} == {*plain[3], *plain[4]}
    one, other = sorted([sorted(pooled[3]), sorted(pooled[4])])
    assert max(one) < min(other)


T, F = True, False


def test_demonstrations_are_padded_right_and_only_responses_are_targets() -> None:
    # 0, the filler, is also a real token here: masks come from lengths, not from ids.
    rows = (([5, 6], [7, 8, 9]), ([5, 6, 7], [9]), ([0], [0]))
    batch = collate_demonstrations([DemonstrationTokens(*row) for row in rows], pad_id=0)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 9, 0], [0, 0, 0, 0, 0]]
    assert batch.mask.tolist() == [[T, T, T, T, T], [T, T, T, T, F], [T, T, F, F, F]]
    assert batch.target_mask.tolist() == [[F, F, T, T, T], [F, F, F, T, F], [F, T, F, F, F]]


def test_the_sides_of_preferences_are_padded_apart() -> None:
    batch = collate_preferences(
        [PreferenceTokens([1, 2], [3, 4], [5], 0.5), PreferenceTokens([1], [2], [3, 4, 5, 6], 0.0)],
        pad_id=99,
    )
    assert batch.chosen.tolist() == [[1, 2, 3, 4], [1, 2, 99, 99]]
    assert batch.margin.tolist() == [0.5, 0.0]
    assert batch.chosen_mask.tolist() == [[T, T, T, T], [T, T, F, F]]
    assert batch.rejected.tolist() == [[1, 2, 5, 99, 99], [1, 3, 4, 5, 6]]
    assert batch.rejected_mask.tolist() == [[T, T, T, F, F], [T, T, T, T, T]]


def test_prompts_are_padded_left() -> None:
    batch = collate_prompts([PromptTokens([1, 2, 3], 4), PromptTokens([0], 2)], pad_id=0)
    assert batch.tokens.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert batch.mask.tolist() == [[T, T, T], [F, F, T]]
    assert batch.index.tolist() == [4, 2]
