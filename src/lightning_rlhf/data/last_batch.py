"""The batch of SFT or reward modelling that broke the run off: one Parquet file, one row each.

Columns; those of tokens are lists:

    number                      of the row in the source that the metadata name, from 1: a line of
                                JSONL, a row else
    prompt, response            text, special tokens visible; of a pair prompt, chosen, rejected
    prompt_tokens, ...          ids of each text; the model learns to predict the response, or to
                                score both sides, each after the prompt
    margin                      of a pair
    loss, grad_norm             of the row by itself, before the update that was not made
    logprobs                    of the tokens of a response, nats
    chosen_score, rejected_score

The last ones are missing where they could not be computed any more.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data.lengths import DemonstrationTokens, PreferenceTokens
from lightning_rlhf.data.sources import Unit
from lightning_rlhf.data.tables import (
    FACTS,
    columns,
    entries,
    read_facts,
    read_table,
    tensor,
    token_ids,
    write_table,
)

NAME = "last_batch.parquet"
Kind = Literal["sft", "rm"]
TEXTS: Mapping[Kind, tuple[str, ...]] = {
    "sft": ("prompt", "response"),
    "rm": ("prompt", "chosen", "rejected"),
}
"""Stage -> the fields of its examples that are tokens."""
ROW_FACTS: Mapping[Kind, tuple[str, ...]] = {
    "sft": ("loss", "grad_norm"),
    "rm": ("loss", "grad_norm", "chosen_score", "rejected_score"),
}
"""Stage -> what is known of a row, one number each."""
KINDS: Mapping[str, type | UnionType] = {
    "stage": str, "step": int, "source": str, "unit": str, "machine": dict,
}  # fmt: skip
"""Key of the metadata -> type."""


@dataclass(frozen=True, kw_only=True)
class LastBatch:
    """The examples of an optimizer step that was not made, in their order."""

    stage: Kind
    step: int
    """From 1, those that were not made counted too."""
    source: str
    unit: Unit
    numbers: Sequence[int]
    """Of each example in the source, in `unit`, from 1."""
    examples: Sequence[DemonstrationTokens] | Sequence[PreferenceTokens]
    facts: Mapping[str, Tensor]
    """What `predict_step` of the stage's module says of them; none where it failed."""
    machine: Mapping[str, str]


def last_batch_of(folder: Path) -> Path:
    """Where a run keeps it."""
    return folder / NAME


def write_last_batch(path: Path, batch: LastBatch, show: Callable[[Sequence[int]], str]) -> None:
    """Write the file whole or not at all. show: tokens as text.

    Raises StorageError where the disk holds no more.
    """
    columns: dict[str, Any] = {"number": pa.array(batch.numbers, pa.int64())}
    sides = {
        name: [list(getattr(example, name)) for example in batch.examples]
        for name in TEXTS[batch.stage]
    }
    columns |= {name: pa.array(map(show, rows), pa.string()) for name, rows in sides.items()}
    columns |= {
        f"{name}_tokens": pa.array(rows, pa.list_(pa.int64())) for name, rows in sides.items()
    }
    if batch.stage == "rm":
        margins = [getattr(example, "margin") for example in batch.examples]  # noqa: B009
        columns["margin"] = pa.array(margins, pa.float64())
    for name, numbers in batch.facts.items():
        column = pa.array(numbers.float().cpu().numpy())
        if name == "logprobs":
            ends = np.cumsum([0, *map(len, sides["response"])])
            column = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), column)
        columns[name] = column
    facts = {
        "stage": batch.stage,
        "step": batch.step,
        "source": batch.source,
        "unit": batch.unit,
        "machine": batch.machine,
    }
    write_table(path, pa.table(columns), {FACTS: json.dumps(facts).encode()})


def read_last_batch(path: Path) -> LastBatch:
    """What `write_last_batch` wrote. Raises DataError where the file is missing or damaged."""
    if not path.is_file():
        raise DataError(
            f"{path} does not exist: stage=sft and stage=rm leave one where max_nonfinite updates "
            "in a row are not finite"
        )
    return read_table(path, from_table, "the batch that broke a run off")


def from_table(table: pa.Table) -> LastBatch:
    """Of the columns of the file. Raises KeyError, TypeError or ValueError."""
    facts = read_facts(table, KINDS, "no run wrote it")
    stage: Kind = facts["stage"]
    if stage not in TEXTS or facts["unit"] not in get_args(Unit) or facts["step"] < 1:
        raise ValueError(
            f"its metadata are of stage {stage!r}, step {facts['step']} and unit {facts['unit']!r}"
        )
    texts = [f"{name}_tokens" for name in TEXTS[stage]]
    types = {"number": pa.int64(), **dict.fromkeys(texts, pa.list_(pa.int64()))}
    types |= {"margin": pa.float64()} if stage == "rm" else {}
    known = {**dict.fromkeys(ROW_FACTS[stage], pa.float32()), "logprobs": pa.list_(pa.float32())}
    types |= {name: x for name, x in known.items() if name in table.column_names}
    column = columns(table, types)
    for name in texts:
        token_ids(column[name])
    sides = [[array("i", tokens) for tokens in column[name].to_pylist()] for name in texts]
    if not len(table) or not all(all(map(len, side)) for side in sides[1:]):
        raise ValueError("it has no row, or one without a response")
    examples: list[Any]
    if stage == "sft":
        examples = [DemonstrationTokens(*row) for row in zip(*sides, strict=True)]
    else:
        margins = tensor(column["margin"]).tolist()
        examples = [PreferenceTokens(*row) for row in zip(*sides, margins, strict=True)]
    found: dict[str, torch.Tensor] = {
        name: tensor(column[name]) for name in ROW_FACTS[stage] if name in column
    }
    if "logprobs" in column:
        found["logprobs"] = entries(column["logprobs"])
    return LastBatch(
        stage=stage,
        step=facts["step"],
        source=facts["source"],
        unit=facts["unit"],
        numbers=tensor(column["number"]).tolist(),
        examples=examples,
        facts=found,
        machine=facts["machine"],
    )
