"""Parquet tables: written atomically, read with a single error message for any kind of damage."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from lightning_rlhf.core.errors import DataError, first_line
from lightning_rlhf.io.storage import written_whole

T = TypeVar("T")
FACTS = b"lightning_rlhf"
"""Key under which a file's metadata hold a JSON object."""


def write_table(path: Path, table: pa.Table, facts: Mapping[bytes, bytes]) -> None:
    """Write a table with metadata atomically: whole or not at all.

    Raises StorageError if the disk is full.
    """
    with (
        written_whole(path, table.nbytes) as beside,
        pq.ParquetWriter(
            beside, table.schema, compression="zstd", write_page_checksum=True, store_schema=False
        ) as file,
    ):
        file.add_key_value_metadata(facts)
        file.write_table(table)


def read_table(path: Path, convert: Callable[[pa.Table], T], what: str) -> T:
    """Return `convert` applied to the table in a file.

    what: description of the expected content, for errors.

    Raises DataError if the file is damaged or holds something else.
    """
    cause: Exception
    try:
        return convert(pq.read_table(path, page_checksum_verification=True))
    except KeyError as error:
        cause, reason = error, f"it has no {error.args[0]}"
    except (
        pa.ArrowException, OSError, zlib.error, AttributeError, OverflowError, TypeError,
        ValueError, RuntimeError,
    ) as error:  # fmt: skip
        cause, reason = error, first_line(error)
    raise DataError(f"{path} cannot be read as {what}: {reason}") from cause


def read_facts(
    table: pa.Table, kinds: Mapping[str, type | UnionType], absent: str
) -> dict[str, Any]:
    """Return the JSON object in the metadata, with a value of its type under each key of `kinds`.

    absent: message of the error for metadata without such an object.

    Raises ValueError, KeyError or TypeError if the object is missing or has another form.
    """
    metadata = table.schema.metadata or {}
    if FACTS not in metadata:
        raise ValueError(absent)
    found = json.loads(metadata[FACTS])
    if not isinstance(found, dict):
        raise TypeError(f"its metadata are no object, but a {type(found).__name__}")
    for key, kind in kinds.items():
        if isinstance(found[key], bool) or not isinstance(found[key], kind):
            raise TypeError(f"{key} in its metadata is {found[key]!r:.60}")
    return found


def columns(table: pa.Table, types: Mapping[str, pa.DataType]) -> dict[str, pa.Array]:
    """Return the named columns, each cast to its type.

    Raises KeyError if one is missing, pa.ArrowException if one holds something else.
    """
    for name in types:
        if name not in table.column_names:
            raise KeyError(name)
    chosen = table.select(list(types)).cast(pa.schema(types))
    return {name: chosen[name].combine_chunks() for name in types}


def token_ids(column: pa.ListArray) -> Tensor:
    """Return the entries of lists of token ids, concatenated.

    Raises ValueError if one is negative or missing.
    """
    ids = entries(column)
    if ids.numel() and int(ids.min()) < 0:
        raise ValueError(f"a token id is {int(ids.min())}")
    return ids


def entries(column: pa.ListArray) -> Tensor:
    """Return the entries of the lists, concatenated. Raises ValueError if one is missing."""
    return tensor(column.flatten())


def tensor(column: pa.Array) -> Tensor:
    """Return a tensor of the same type. Raises ValueError if an entry is missing."""
    if column.null_count:
        raise ValueError(f"{column.null_count} numbers are missing")
    return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
