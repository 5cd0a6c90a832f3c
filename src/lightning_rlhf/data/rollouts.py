"""Recorded iterations of PPO: one Parquet file per iteration, one row per response.

Columns, of which those of tokens are lists with one entry per response token:

    index                       row of the prompt in its dataset
    prompt, response            texts
    prompt_tokens, response_tokens
    padding_tokens              token ids at padding positions, which are masked but part of the
                                tensors that the update runs on
    logprobs, ref_logprobs      nats
    values                      present only with a critic
    kl, rewards, advantages, returns
    score, parts, ended         one entry per response; `parts` by component of the reward

The file's metadata hold all other inputs of the update, and its results.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool
from torch import Tensor

from lightning_rlhf.core.types import Experience, IterationBatch, UpdateStats
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
from lightning_rlhf.io.storage import make_folder
from lightning_rlhf.parallel.world import world

FOLDER = "rollouts"
"""Name of the folder of recorded iterations in a run folder."""
UPDATES = "updates"
"""Metadata key of the weights file: number of updates of the iteration that the weights include."""
PER_TOKEN: Mapping[str, str] = {
    "logprobs": "old_logprobs",
    "ref_logprobs": "ref_logprobs",
    "values": "old_values",
    "kl": "kl",
    "rewards": "rewards",
    "advantages": "advantages",
    "returns": "returns",
}
"""Field of Experience that each per-token column holds."""
TYPES: Mapping[str, pa.DataType] = {
    "index": pa.int64(),
    "prompt": pa.string(),
    "response": pa.string(),
    **dict.fromkeys(("prompt_tokens", "response_tokens", "padding_tokens"), pa.list_(pa.int64())),
    **dict.fromkeys(PER_TOKEN, pa.list_(pa.float32())),
    "score": pa.float32(),
    "ended": pa.bool_(),
}
"""Type of each column; `parts` is a struct of float32."""
KINDS: Mapping[str, type | UnionType] = {
    "iteration": int,
    "prompt_width": int,
    "response_width": int,
    "kl_coef": float | int,
    "shuffle": str,
    "updates": list | None,
    "parameters": str | None,
    "machine": dict,
}
"""Type of each value in the metadata."""
LARGEST_STATE = 2**20
"""Maximum size of a generator's unpacked state in bytes; a real one has about 5000."""


@dataclass(frozen=True, kw_only=True)
class Recorded(IterationBatch):
    """One iteration: the inputs of its update, the texts, and the results."""

    iteration: int
    """Number of the iteration, from 1."""
    prompts: Sequence[str]
    responses: Sequence[str]
    components: Sequence[str]
    """Names of the reward's components, in the order of `experience.component_scores`."""
    has_critic: bool
    updates: Sequence[Mapping[str, float]] | None
    """UpdateStats of each minibatch; None if the iteration did not finish."""
    parameters: str | None
    """`parameters_digest` of the trained parameters after the update; None if it did not finish."""
    machine: Mapping[str, str]
    """Properties of the machine that may change the numbers, see `machine`."""


def stats(updates: Sequence[UpdateStats]) -> list[dict[str, float]]:
    """Return the fields of each update as numbers, without rounding."""
    return [{f.name: float(getattr(u, f.name)) for f in fields(u)} for u in updates]


def machine(device: torch.device) -> dict[str, str]:
    """Return the properties of the machine that may change how a computation rounds."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    facts = {"torch": torch.__version__, "device": name, "threads": str(torch.get_num_threads())}
    processes = world().size
    return facts | ({"processes": str(processes)} if processes > 1 else {})


def file_of(run_dir: Path, iteration: int) -> Path:
    """Return the path of a recorded iteration in a run folder."""
    return run_dir / FOLDER / f"{iteration:06d}.parquet"


def weights_of(run_dir: Path, iteration: int) -> Path:
    """Return the path of the weights after an iteration whose updates stopped the run."""
    return file_of(run_dir, iteration).with_suffix(".safetensors")


def recorded_iterations(run_dir: Path) -> list[int]:
    """Return the numbers of the iterations that have a file, in ascending order."""
    files = (run_dir / FOLDER).glob("*.parquet")
    return sorted(int(p.stem) for p in files if re.fullmatch("[0-9]{6,}", p.stem))


def write_recorded(path: Path, recorded: Recorded) -> None:
    """Write the file atomically, whole or not at all, and make its folder.

    Raises StorageError if the disk is full.
    """
    make_folder(path.parent)
    write_table(path, as_table(recorded), facts_of(recorded))


def as_table(recorded: Recorded) -> pa.Table:
    """Return the iteration as a table with one row per response."""
    experience = recorded.experience.to("cpu")
    mask = experience.response_mask
    width = experience.mask.shape[1] - mask.shape[1]
    prompt, prompt_mask = experience.tokens[:, :width], experience.mask[:, :width]
    columns: dict[str, Any] = {
        "index": experience.index.numpy(),
        "prompt": pa.array(recorded.prompts, pa.string()),
        "response": pa.array(recorded.responses, pa.string()),
        "prompt_tokens": lists(prompt, prompt_mask),
        "response_tokens": lists(experience.responses, mask),
        "padding_tokens": lists(experience.tokens, ~experience.mask),
    }
    for column, field in PER_TOKEN.items():
        if column != "values" or recorded.has_critic:
            columns[column] = lists(getattr(experience, field), mask)
    columns["score"] = experience.score.numpy()
    columns["parts"] = pa.StructArray.from_arrays(
        [pa.array(part.numpy()) for part in experience.component_scores.T],
        list(recorded.components),
    )
    columns["ended"] = experience.ended.numpy()
    return pa.table(columns)


def facts_of(recorded: Recorded) -> dict[bytes, bytes]:
    """Return the file's metadata."""
    whole, response = recorded.experience.mask, recorded.experience.response_mask
    shuffle = zlib.compress(recorded.shuffle.numpy().tobytes())
    facts = {
        "iteration": recorded.iteration,
        "kl_coef": recorded.kl_coef,
        "prompt_width": whole.shape[1] - response.shape[1],
        "response_width": response.shape[1],
        "shuffle": base64.b64encode(shuffle).decode(),
        "updates": recorded.updates,
        "parameters": recorded.parameters,
        "machine": recorded.machine,
    }
    return {FACTS: json.dumps(facts).encode()}


def read_recorded(path: Path) -> Recorded:
    """Read the iteration in a file, bit for bit.

    Raises DataError if the file is damaged or holds something else.
    """
    return read_table(path, from_table, "an iteration that was recorded")


def from_table(table: pa.Table) -> Recorded:
    """Return the iteration from which `as_table` and `facts_of` made the table and its metadata.

    Raises KeyError, TypeError or ValueError if the table does not have the form of such a file.
    """
    facts = read_facts(table, KINDS, "it was not written by record=true")
    has_critic = "values" in table.column_names
    types = {name: x for name, x in TYPES.items() if name != "values" or has_critic}
    column = columns(table, types)
    parts = table["parts"].combine_chunks()
    if not pa.types.is_struct(parts.type):
        raise TypeError(f"parts is {parts.type}")
    check_widths(column, facts["prompt_width"] + facts["response_width"])
    check_updates(facts["updates"])
    prompt_mask = ragged_mask(column["prompt_tokens"], facts["prompt_width"]).flip(1)
    mask = ragged_mask(column["response_tokens"], facts["response_width"])
    packed = base64.b64decode(facts["shuffle"])
    shuffle = bytearray(zlib.decompressobj().decompress(packed, LARGEST_STATE))
    whole = torch.cat([prompt_mask, mask], dim=1)
    tokens = torch.empty(whole.shape, dtype=torch.long)
    width = facts["prompt_width"]
    tokens[:, :width][prompt_mask] = token_ids(column["prompt_tokens"])
    tokens[:, width:][mask] = token_ids(column["response_tokens"])
    tokens[~whole] = token_ids(column["padding_tokens"])
    per_token = {}
    for name, field in PER_TOKEN.items():
        per_token[field] = torch.zeros(mask.shape)
        if name != "values" or has_critic:
            if not torch.equal(ragged_mask(column[name], mask.shape[1]), mask):
                raise ValueError(f"{name} has not one number for each response token")
            per_token[field][mask] = entries(column[name])
    recorded = Recorded(
        experience=Experience(
            tokens=tokens,
            mask=whole,
            response_mask=mask,
            component_scores=torch.stack(
                [tensor(part.cast(pa.float32())) for part in parts.flatten()], dim=1
            ),
            score=tensor(column["score"]),
            ended=tensor(column["ended"]),
            index=tensor(column["index"]),
            **per_token,
        ),
        kl_coef=facts["kl_coef"],
        shuffle=torch.frombuffer(shuffle, dtype=torch.uint8),
        iteration=facts["iteration"],
        prompts=column["prompt"].to_pylist(),
        responses=column["response"].to_pylist(),
        components=[field.name for field in parts.type],
        has_critic=has_critic,
        updates=facts["updates"],
        parameters=facts["parameters"],
        machine=facts["machine"],
    )
    recorded.generator()  # raises unless `shuffle` is a generator's state
    return recorded


def check_widths(column: Mapping[str, pa.ListArray], width: int) -> None:
    """Raise ValueError unless each row has a response, and `width` tokens with its padding."""
    names = ("prompt_tokens", "response_tokens", "padding_tokens")
    lengths = [np.diff(column[name].offsets.to_numpy()) for name in names]
    if not len(lengths[1]) or lengths[1].min() < 1:
        raise ValueError("it has no response, or one without a token")
    if any(column[name].null_count for name in ("prompt", "response")):
        raise ValueError("a text is missing")
    if (sum(lengths) != width).any():
        raise ValueError(f"a row has not {width} tokens with its padding")


def check_updates(updates: Any) -> None:
    """Raise TypeError unless `updates` is None or has the form that `stats` returns."""
    for update in updates or ():
        if not isinstance(update, dict) or not all(type(x) is float for x in update.values()):
            raise TypeError(f"an update in its metadata is {update!r:.60}")


def lists(x: Tensor, mask: Bool[Tensor, "B T"]) -> pa.ListArray:
    """Return for each row the list of its entries where the mask is True."""
    ends = np.concatenate([[0], mask.sum(dim=1).cumsum(0).numpy()])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(x[mask].numpy()))


def ragged_mask(column: pa.ListArray, width: int) -> Bool[Tensor, "B T"]:
    """Return the mask that is True in as many first columns of a row as its list has entries.

    Raises ValueError if a list has more than `width` entries.
    """
    lengths = torch.from_numpy(np.diff(column.offsets.to_numpy()))
    if lengths.numel() and int(lengths.max()) > width:
        raise ValueError(f"a list has {int(lengths.max())} entries, {width} at most")
    return torch.arange(width) < lengths[:, None]
