"""A kept batch comes back from its file as it was, or not at all."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_rlhf.core.errors import DataError, StorageError
from lightning_rlhf.data.last_batch import (
    LastBatch,
    last_batch_of,
    read_last_batch,
    write_last_batch,
)
from lightning_rlhf.data.lengths import DemonstrationTokens, DialogueTokens, PreferenceTokens

LOSS = torch.tensor([math.nan, 1 / 3])


def tokens(*ids: int) -> array[int]:
    return array("i", ids)


def kept(stage: Any = "sft", **changes: Any) -> LastBatch:
    """Two rows; the first response has two tokens, the second one."""
    logprobs = torch.tensor([-0.1, math.nan, -math.inf])
    examples: list[Any] = [
        DemonstrationTokens(tokens(1, 2), tokens(3, 4)),
        DemonstrationTokens(tokens(5), tokens(6)),
    ]
    facts = {"loss": LOSS, "grad_norm": torch.tensor([math.inf, 2.5]), "logprobs": logprobs}
    if stage != "sft":
        examples = [
            PreferenceTokens(tokens(1, 2), tokens(3, 4), tokens(5), 0.1 + 0.2),
            PreferenceTokens(tokens(7), tokens(8), tokens(9, 10), 1e39),  # above any float32
        ]
        scores = {f"{side}_score": torch.tensor([-0.0, 1e-45]) for side in ("chosen", "rejected")}
        facts = {"loss": LOSS, "grad_norm": torch.tensor([0.0, math.nan]), **scores}
    found = {
        "stage": stage,
        "step": 12,
        "source": "data/ü.jsonl",
        "unit": "line",
        "numbers": [17, 3],
        "examples": examples,
        "facts": facts,
        "machine": {"torch": "2", "device": "cpu"},
    }
    return LastBatch(**found | changes)


def show(ids: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in ids)


def written(folder: Path, batch: LastBatch) -> Path:
    path = last_batch_of(folder)
    write_last_batch(path, batch, show)
    return path


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
@pytest.mark.parametrize("has_facts", [True, False])
def test_it_comes_back_as_it_was(tmp_path: Path, stage: Any, has_facts: bool) -> None:
    batch = kept(stage, **({} if has_facts else {"facts": {}}))
    found = read_last_batch(written(tmp_path, batch))
    for name in ("stage", "step", "source", "unit", "numbers", "examples", "machine"):
        assert getattr(found, name) == getattr(batch, name), name
    assert found.facts.keys() == batch.facts.keys()
    for name, numbers in batch.facts.items():
        assert torch.equal(found.facts[name].view(torch.int32), numbers.view(torch.int32)), name


def test_pandas_reads_it(tmp_path: Path) -> None:
    table = pandas.read_parquet(written(tmp_path, kept()))
    assert list(table["number"]) == [17, 3]
    assert list(table["prompt"]) == ["<1><2>", "<5>"]
    assert list(table["response"]) == ["<3><4>", "<6>"]
    assert [list(ids) for ids in table["response_tokens"]] == [[3, 4], [6]]
    assert [len(row) for row in table["logprobs"]] == [2, 1]
    assert list(table["logprobs"][1]) == [-math.inf]
    pairs = pandas.read_parquet(written(tmp_path, kept("rm")))
    assert list(pairs["rejected"]) == ["<5>", "<9><10>"]
    assert list(pairs["margin"]) == [0.1 + 0.2, 1e39]


def test_none_is_there(tmp_path: Path) -> None:
    path = last_batch_of(tmp_path)
    with pytest.raises(DataError, match=r"does not exist: stage=sft\|rm\|dpo leaves one where"):
        read_last_batch(path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, kept())
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=rf"^{path} cannot be read as the batch that broke a run"):
        read_last_batch(path)


def test_another_table_is_named(tmp_path: Path) -> None:
    path = last_batch_of(tmp_path)
    pq.write_table(pa.table({"number": [1]}), path)
    with pytest.raises(DataError, match="no run wrote it"):
        read_last_batch(path)


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, kept())
    pq.write_table(pq.read_table(path).drop(["prompt_tokens"]), path)
    with pytest.raises(DataError, match="it has no prompt_tokens"):
        read_last_batch(path)


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, largest_file: Callable[[int], AbstractContextManager[None]]
) -> None:
    with largest_file(100), pytest.raises(StorageError):
        written(tmp_path, kept())
    assert not list(tmp_path.iterdir())


def dialogues() -> LastBatch:
    """Of the first prompt the second token is learned too, of the other none."""
    examples = [
        DialogueTokens(tokens(1, 2), tokens(3, 4), tokens(1)),
        DialogueTokens(tokens(5), tokens(6), tokens()),
    ]
    logprobs = torch.tensor([-9.0, -0.1, math.nan, -math.inf])
    facts = {"loss": LOSS, "grad_norm": LOSS, "logprobs": logprobs}
    return kept(examples=examples, facts=facts)


def test_the_learned_turns_of_a_dialogue_come_back(tmp_path: Path) -> None:
    batch = dialogues()
    path = written(tmp_path, batch)
    found = read_last_batch(path)
    assert found.examples == batch.examples
    assert torch.equal(found.facts["logprobs"][:2], batch.facts["logprobs"][:2])
    assert [len(row) for row in pandas.read_parquet(path)["logprobs"]] == [3, 1]


@pytest.mark.parametrize("position", [-1, 2])
def test_a_learned_token_outside_of_the_prompt(position: int, tmp_path: Path) -> None:
    path = written(tmp_path, dialogues())
    table = pq.read_table(path).drop(["learned"])
    column = pa.array([[position], []], pa.list_(pa.int64()))
    pq.write_table(table.append_column("learned", column), path)
    with pytest.raises(DataError, match="a position in its column 'learned' is outside"):
        read_last_batch(path)
