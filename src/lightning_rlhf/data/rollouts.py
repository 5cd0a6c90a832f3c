"""Recorded iterations of PPO: one Parquet file per iteration, one row per response."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_rlhf.core.errors import DataError, first_line
from lightning_rlhf.io.storage import make_folder, written_whole

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_rlhf.core.records import Experience

FOLDER, LAST_BATCH = "rollouts", "last_batch.parquet"
"""Names in a run folder: of recorded iterations, and of the batch at which SFT, RM or DPO ended."""
PER_TOKEN: Mapping[str, str] = {
    name: f"old_{name}" if name in ("logprobs", "values") else name
    for name in ("logprobs", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns")
}
"""Field of Experience that each per-token column of numbers holds."""
TYPES: Mapping[str, pa.DataType] = {
    "index": pa.int64(),
    "prompt": pa.string(),
    "response": pa.string(),
    "prompt_tokens": pa.list_(pa.int64()),
    "response_tokens": pa.list_(pa.int64()),
    "token_texts": pa.list_(pa.string()),
    **dict.fromkeys(PER_TOKEN, pa.list_(pa.float32())),
    "score": pa.float32(),
    "ended": pa.bool_(),
}
"""Type of each column; lists have one entry for each token. `values` is there only with a critic;
`parts`, a struct of float32, has the score of each component of the reward."""


def file_of(run_dir: Path, iteration: int) -> Path:
    """Return the path of a recorded iteration in a run folder."""
    return run_dir / FOLDER / f"{iteration:06d}.parquet"


def recorded_iterations(run_dir: Path) -> list[int]:
    """Return the numbers of the iterations that have a file, in ascending order."""
    files = (run_dir / FOLDER).glob("*.parquet")
    return sorted(int(p.stem) for p in files if re.fullmatch("[0-9]{6,}", p.stem))


def write_table(path: Path, columns: Mapping[str, Any]) -> None:
    """Write the columns atomically, whole or not at all, and make the file's folder.

    Raises StorageError if the disk is full.
    """
    make_folder(path.parent)
    table = pa.table(dict(columns))
    options = {"compression": "zstd", "write_page_checksum": True, "store_schema": False}
    with written_whole(path, table.nbytes) as temporary:
        pq.write_table(table, temporary, **options)


def recorded_columns(
    experience: Experience,
    prompts: Sequence[str],
    responses: Sequence[str],
    *,
    components: Sequence[str],
    show: Callable[[Sequence[int]], str],
    has_critic: bool,
) -> dict[str, Any]:
    """Return the columns of an iteration.

    components: names of the components of the reward. show: function that returns tokens as text.
    """
    experience = experience.to("cpu")
    mask = experience.response_mask
    width = experience.mask.shape[1] - mask.shape[1]
    ids = lists(experience.responses, mask)
    texts = {token: show([token]) for token in set(ids.values.to_pylist())}
    parts = [pa.array(part.numpy()) for part in experience.component_scores.T]
    return {
        "index": experience.index.numpy(),
        "prompt": pa.array(prompts, pa.string()),
        "response": pa.array(responses, pa.string()),
        "prompt_tokens": lists(experience.tokens[:, :width], experience.mask[:, :width]),
        "response_tokens": ids,
        "token_texts": pa.array([[texts[token] for token in row] for row in ids.to_pylist()]),
        **{
            column: lists(getattr(experience, field), mask)
            for column, field in PER_TOKEN.items()
            if column != "values" or has_critic
        },
        "score": experience.score.numpy(),
        "parts": pa.StructArray.from_arrays(parts, list(components)),
        "ended": experience.ended.numpy(),
    }


def lists(x: Tensor, mask: Tensor) -> pa.ListArray:
    """Return for each row the list of its entries where the mask is True."""
    ends = np.concatenate([[0], mask.sum(dim=1).cumsum(0).numpy()])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(x[mask].numpy()))


def read_recorded(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a recorded iteration: column -> value, or list of values.

    Raises DataError if the file is damaged or holds something else.
    """
    try:
        if not path.is_file():  # such as a pipe, which would wait for a writer
            raise FileNotFoundError("no such file")
        table = pq.read_table(path, page_checksum_verification=True)
        names = [name for name in TYPES if name != "values" or name in table.column_names]
        types = pa.schema([(name, TYPES[name]) for name in names])
        rows: list[dict[str, Any]] = table.select(names).cast(types).to_pylist()
        for row, parts in zip(rows, table["parts"].to_pylist(), strict=True):
            row["parts"] = dict(parts)
        if not rows:
            raise ValueError("it has no response")
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{path} cannot be read as an iteration: {first_line(error)}") from error
    return rows
