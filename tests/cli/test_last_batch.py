"""The batch that broke SFT or reward modelling off: kept, and shown by lightning-rlhf replay."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.errors import StorageError
from lightning_rlhf.core.record import Record
from lightning_rlhf.core.types import Demonstrations
from lightning_rlhf.data.collate import collate_demonstrations, collate_preferences
from lightning_rlhf.data.last_batch import last_batch_of, read_last_batch, write_last_batch
from lightning_rlhf.data.lengths import PreferenceTokens
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.modules.sft import SFTModule

from .conftest import Outcome, Workplace

LINE = 9
"""Of the training data, from 1: no update can be made of it."""
LONG = 40
"""Tokens that no other response has."""
STAGES = ("sft", "rm")
FILES = {"sft": "sft_train", "rm": "preferences_train"}


def breaking(stage: str, *more: str) -> list[str]:
    """Six batches of four rows, two at a time; no checkpoint is due before the last."""
    keys = ("checkpoint_every=10", "val_every=6", "max_nonfinite=1", *more)
    return [f"stage={stage}", "job=bad", *(f"{stage}.{key}" for key in keys)]


def folder(place: Workplace, stage: str) -> Path:
    return place.outputs / "default" / "mini" / "bad" / stage


@pytest.fixture
def place(finished: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """One whose data hold a row that is not finite, in either kind.

    A margin of 1e39 is infinite in fp32, and with it the loss of its pair, -log sigmoid(-inf).
    Of demonstrations it is the one with more than LONG tokens, whose log-probabilities are spoiled.
    """
    for name in FILES.values():
        file = finished.folder / "data" / f"{name}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for number, row in enumerate(rows, start=1):
            row["margin"] = 1e39 if number == LINE else 0.0
        if name == FILES["sft"]:
            rows[LINE - 1]["response"] = " no" * (LONG + 5)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    logprobs = SFTModule.logprobs

    def spoiled(self: SFTModule, batch: Demonstrations, *targets: Tensor) -> Tensor:
        counts = batch.target_mask.sum(dim=1)
        is_spoiled = (counts > LONG).repeat_interleave(counts)
        return torch.where(is_spoiled, torch.nan, 1.0) * logprobs(self, batch, *targets)

    monkeypatch.setattr(SFTModule, "logprobs", spoiled)
    return finished


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """The batches that are trained on, as they come."""
    batches: list[Record] = []

    def noting(step: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, batch: Any, batch_idx: int) -> Any:
            batches.append(batch)
            return step(self, batch, batch_idx)

        return noted

    for module in (SFTModule, RewardModule):
        monkeypatch.setattr(module, "training_step", noting(module.training_step))
    return batches


def run(place: Workplace, stage: str, *more: str) -> Outcome:
    own = ("margin_coef=1",) if stage == "rm" else ()
    return place.mini(*breaking(stage, *own, *more))


# Kept.


@pytest.mark.parametrize("stage", STAGES)
def test_the_whole_batch_is_kept_in_a_file_that_the_error_names(
    place: Workplace, seen: list[Record], stage: str
) -> None:
    outcome = run(place, stage)
    path = last_batch_of(folder(place, stage))
    named = re.escape(str(path.relative_to(place.folder)))
    shown = re.escape(str(folder(place, stage).relative_to(place.folder)))
    assert re.search(
        rf"^error: 1 update in a row \({stage}\.max_nonfinite\) .* is kept in {named}, "
        rf"and `lightning-rlhf replay {shown}` shows its rows$", outcome.err, re.MULTILINE
    )  # fmt: skip
    kept, table = read_last_batch(path), pandas.read_parquet(path)
    assert kept.step == len(seen) > 1  # so that the first updates were made
    collate: Any = collate_demonstrations if stage == "sft" else collate_preferences
    again, trained = collate(kept.examples, 0), seen[-1]
    assert len(trained) == 4
    for name in ("tokens", "target_mask") if stage == "sft" else ("chosen", "rejected", "margin"):
        mask = getattr(trained, {"tokens": "mask"}.get(name, f"{name}_mask"), ...)
        assert torch.equal(getattr(again, name)[mask], getattr(trained, name)[mask]), name
    lines = (place.folder / "data" / f"{FILES[stage]}.jsonl").read_text().splitlines()
    for _, row in table.iterrows():
        written = json.loads(lines[row["number"] - 1])
        for text in ("prompt", "response") if stage == "sft" else ("prompt", "chosen", "rejected"):
            assert written[text].strip() in row[text]
    bad = [n for n, loss in zip(table["number"], table["loss"], strict=True) if loss - loss != 0]
    assert bad == [LINE]


@pytest.mark.parametrize("stage", STAGES)
def test_the_end_leaves_the_weights_that_the_update_was_to_move(
    place: Workplace, stage: str
) -> None:
    run(place, stage)
    step = read_last_batch(last_batch_of(folder(place, stage))).step
    names = [path.name for path in (folder(place, stage) / "checkpoints").iterdir()]
    assert names == [f"{step - 1:06d}.ckpt"]


def test_a_resumed_run_comes_to_the_batch_again(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(place, "sft")
    path = last_batch_of(folder(place, "sft"))
    before = path.read_bytes()
    assert run(place, "sft").error.startswith(f"{folder(place, 'sft').relative_to(place.folder)} ")
    assert path.read_bytes() == before
    assert place.mini(*breaking("sft"), "resume=true").status == 1
    assert path.read_bytes() == before
    monkeypatch.undo()
    place.mini(*breaking("sft"), "resume=true").succeeded  # noqa: B018
    assert not path.exists()


def test_a_batch_that_finds_no_room_does_not_hide_why_the_run_ended(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise StorageError("no room")

    monkeypatch.setattr("lightning_rlhf.callbacks.keep_last_batch.write_last_batch", full)
    outcome = run(place, "sft")
    assert "1 update in a row (sft.max_nonfinite)" in outcome.err
    assert "is kept in" not in outcome.err
    assert "the batch of the last update is not kept: no room" in outcome.out


def test_rows_whose_loss_finds_no_memory_are_kept_without(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(SFTModule, "predict_step", full)
        outcome = run(place, "sft")
    assert "no loss of single rows beside the batch that is kept: out of memory" in outcome.out
    table = pandas.read_parquet(last_batch_of(folder(place, "sft")))
    assert LINE in list(table["number"])
    assert "loss" not in table
    again = place.call("replay", str(folder(place, "sft"))).succeeded.out.splitlines()[-1]
    assert re.search(rf"1 is not finite: line {LINE} \(loss nan, gradient norm nan\)$", again)


# Replayed.

VARIANTS = {
    "sft": ("sft", ()),
    "sft lora": ("sft", ("finetune=lora",)),
    "rm": ("rm", ()),
    "rm full heads": ("rm", ("heads=3", "finetune=full")),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_replay_says_which_row_is_not_finite(
    place: Workplace, variant: str, precision: str
) -> None:
    stage, more = VARIANTS[variant]
    place.mini(*breaking(stage, *more, *["margin_coef=1"] * (stage == "rm")),
               f"trainer.precision={precision}")  # fmt: skip
    path = last_batch_of(folder(place, stage))
    kept = read_last_batch(path)
    outcome = place.call("replay", str(folder(place, stage)), "--responses", "1").succeeded
    last = outcome.out.splitlines()[-1]
    assert last.startswith(
        f"step {kept.step} was not made: of 4 rows of data/{FILES[stage]}.jsonl 1 is not finite: "
        f"line {LINE} (loss "
    )
    assert last.endswith("; the run computed the same numbers of each")
    assert "shown: 1 of 4 rows" in outcome.out
    assert f"\nline {LINE}: loss " in outcome.out  # it comes first
    assert "Warning" not in outcome.err
    row = pandas.read_parquet(path).set_index("number").loc[LINE]
    sides = ("response",) if stage == "sft" else ("chosen", "rejected")
    shown = [line for line in outcome.out.splitlines() if re.match(" +'", line)]
    assert len(shown) == max(len(row[f"{side}_tokens"]) for side in sides)


def test_a_gradient_that_is_not_finite_is_told_where_the_loss_is(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sqrt(x - x) adds 0, but its gradient is infinity times 0: of a quarter of the rows or so."""
    logprobs = SFTModule.logprobs

    def spoiled(self: SFTModule, batch: Demonstrations, *targets: Tensor) -> Tensor:
        found = logprobs(self, batch, *targets)
        counts = batch.target_mask.sum(dim=1)
        is_spoiled = (batch.tokens.sum(dim=1) % 4 == 1).repeat_interleave(counts)
        return found + torch.where(is_spoiled, (found - found).sqrt(), 0)

    monkeypatch.setattr(SFTModule, "logprobs", spoiled)
    assert run(finished, "sft").status == 1
    last = finished.call("replay", str(folder(finished, "sft"))).succeeded.out.splitlines()[-1]
    found = re.findall(r"line \d+ \(loss (\S+), gradient norm (\S+)\)", last)
    assert found
    assert all(math.isfinite(float(loss)) and norm == "nan" for loss, norm in found)


def test_a_loss_that_was_another_is_told(place: Workplace) -> None:
    """Of the first row that is finite, as if the run had rounded otherwise."""
    run(place, "sft")
    path = last_batch_of(folder(place, "sft"))
    table = pq.read_table(path)
    losses = table["loss"].to_pylist()
    row = next(i for i, loss in enumerate(losses) if loss == loss)
    was, losses[row] = losses[row], 1.5
    number = table["number"][row].as_py()
    at = table.column_names.index("loss")
    changed = table.set_column(at, "loss", [losses])
    pq.write_table(changed.cast(table.schema), path)
    outcome = place.call("replay", str(folder(place, "sft")))
    assert outcome.status == 1
    told = f"the run computed otherwise: loss of line {number} is {was!r}, was 1.5"
    assert outcome.out.splitlines()[-1].endswith(told)


# Refused, before a model loads.


def test_what_is_missing_is_one_message(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model loads")

    run(place, "sft")
    monkeypatch.setattr("lightning_rlhf.models.build_roles.load_causal_lm", load)
    at = folder(place, "sft")
    kept = read_last_batch(last_batch_of(at))
    step = kept.step
    error = place.call("replay", str(at), "--iteration", "77").error
    assert error == f"step 77 of {at} is not kept; the one that is kept is {step}"
    checkpoint = at / "checkpoints" / f"{step - 1:06d}.ckpt"
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[:500])
    assert place.call("replay", str(at)).error.startswith(f"{checkpoint} cannot be read")
    checkpoint.unlink()
    error = place.call("replay", str(at)).error
    assert error.startswith(f"step {step} of {at} cannot be replayed: {checkpoint}, the weights")
    last_batch_of(at).unlink()
    error = place.call("replay", str(at)).error
    assert error.startswith(f"{last_batch_of(at)} does not exist: stage=sft|rm|dpo leaves one")
    pair = PreferenceTokens([1], [2], [3], 0.0)
    of_pairs = replace(kept, stage="rm", examples=[pair] * 4, facts={})
    write_last_batch(last_batch_of(at), of_pairs, str)
    error = place.call("replay", str(at)).error
    assert error == f"{last_batch_of(at)} is of stage=rm, the run of stage=sft"
