"""The batch of SFT, a reward model or DPO that stopped a run: a Parquet file, a row per example.

Columns, of which those of tokens are lists:

    number                      number of the row in the source that the metadata names, from 1: a
                                line of JSONL, otherwise a row
    prompt, response            texts with special tokens visible; for a pair prompt, chosen and
                                rejected
    prompt_tokens, ...          token ids of each text; the model learns to predict the response, or
                                to prefer one side, each after the prompt
    learned                     with data.train_on=all: positions of the tokens of the prompt that
                                 are learned as well
    margin                      strength of the preference of a pair
    loss, grad_norm             loss and gradient norm of the row alone, before the update that was
                                skipped
    logprobs                    log-probabilities of the response tokens, nats; with
                                data.train_on=all after those of the prompt
    chosen_score, rejected_score

The columns from `loss` on are absent if they could not be computed.
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
from lightning_rlhf.data.lengths import DemonstrationTokens, DialogueTokens, PreferenceTokens
from lightning_rlhf.data.parquet import (
    FACTS,
    columns,
    entries,
    read_facts,
    read_table,
    tensor,
    token_ids,
    write_table,
)
from lightning_rlhf.data.sources import Unit

NAME = "last_batch.parquet"
"""Name of the file in a run folder."""
Kind = Literal["sft", "rm", "dpo"]
_PAIR = ("prompt", "chosen", "rejected")
_PAIR_FACTS = ("loss", "grad_norm", "chosen_score", "rejected_score")
TEXTS: Mapping[Kind, tuple[str, ...]] = {
    "sft": ("prompt", "response"),
    "rm": _PAIR,
    "dpo": _PAIR,
}
"""Fields that hold tokens in the examples of each stage."""
ROW_FACTS: Mapping[Kind, tuple[str, ...]] = {
    "sft": ("loss", "grad_norm"),
    "rm": _PAIR_FACTS,
    "dpo": _PAIR_FACTS,
}
"""Measurements of each stage's examples that are one number per row."""
KINDS: Mapping[str, type | UnionType] = {
    "stage": str, "step": int, "source": str, "unit": str, "machine": dict,
}  # fmt: skip
"""Type of each value in the metadata."""


@dataclass(frozen=True, kw_only=True)
class LastBatch:
    """Examples of an optimizer step that was skipped, in their order."""

    stage: Kind
    step: int
    """Number of the optimizer step, from 1; skipped steps count too."""
    source: str
    unit: Unit
    numbers: Sequence[int]
    """Number of each example's row in the source, in `unit`, from 1."""
    examples: Sequence[DemonstrationTokens] | Sequence[PreferenceTokens]
    facts: Mapping[str, Tensor]
    """Measurements that `predict_step` of the stage's module returns for the examples; empty if it
    failed."""
    machine: Mapping[str, str]
    """Properties of the machine that may change the numbers, as `rollouts.machine` returns them."""


def last_batch_of(folder: Path) -> Path:
    """Return the path of the file in a run folder."""
    return folder / NAME


def write_last_batch(path: Path, batch: LastBatch, show: Callable[[Sequence[int]], str]) -> None:
    """Write the file atomically: whole or not at all.

    show: function that returns tokens as text.

    Raises StorageError if the disk is full.
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
    if TEXTS[batch.stage] == _PAIR:
        margins = [getattr(example, "margin") for example in batch.examples]  # noqa: B009
        columns["margin"] = pa.array(margins, pa.float64())
    dialogues = [e for e in batch.examples if isinstance(e, DialogueTokens)]
    if dialogues:
        columns["learned"] = pa.array([list(e.learned) for e in dialogues], pa.list_(pa.int64()))
    for name, numbers in batch.facts.items():
        column = pa.array(numbers.float().cpu().numpy())
        if name == "logprobs":
            counts = [e.targets for e in batch.examples if isinstance(e, DemonstrationTokens)]
            ends = np.cumsum([0, *counts])
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
    """Return what `write_last_batch` wrote.

    Raises DataError if the file is missing or damaged.
    """
    if not path.is_file():
        raise DataError(
            f"{path} does not exist: stage={'|'.join(TEXTS)} leaves one where max_nonfinite "
            "updates in a row are not finite"
        )
    return read_table(path, from_table, "the batch that broke a run off")


def from_table(table: pa.Table) -> LastBatch:
    """Return the batch that a file's table holds.

    Raises KeyError, TypeError or ValueError if the table does not have the form of such a file.
    """
    facts = read_facts(table, KINDS, "no run wrote it")
    stage: Kind = facts["stage"]
    if stage not in TEXTS or facts["unit"] not in get_args(Unit) or facts["step"] < 1:
        raise ValueError(
            f"its metadata are of stage {stage!r}, step {facts['step']} and unit {facts['unit']!r}"
        )
    texts = [f"{name}_tokens" for name in TEXTS[stage]]
    types = {"number": pa.int64(), **dict.fromkeys(texts, pa.list_(pa.int64()))}
    types |= {"margin": pa.float64()} if TEXTS[stage] == _PAIR else {}
    is_dialogue = stage == "sft" and "learned" in table.column_names
    types |= {"learned": pa.list_(pa.int64())} if is_dialogue else {}
    known = {**dict.fromkeys(ROW_FACTS[stage], pa.float32()), "logprobs": pa.list_(pa.float32())}
    types |= {name: x for name, x in known.items() if name in table.column_names}
    column = columns(table, types)
    for name in texts:
        token_ids(column[name])
    sides = [[array("i", tokens) for tokens in column[name].to_pylist()] for name in texts]
    if not len(table) or not all(all(map(len, side)) for side in sides[1:]):
        raise ValueError("it has no row, or one without a response")
    examples: list[Any]
    if is_dialogue:
        learned = [array("i", positions) for positions in column["learned"].to_pylist()]
        for positions, prompt in zip(learned, sides[0], strict=True):
            if any(not 0 <= k < len(prompt) for k in positions):
                raise ValueError("a position in its column 'learned' is outside of the prompt")
        examples = [DialogueTokens(*row) for row in zip(*sides, learned, strict=True)]
    elif TEXTS[stage] != _PAIR:
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
