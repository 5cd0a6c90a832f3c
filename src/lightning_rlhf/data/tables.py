"""Tables on the disk: written whole, read with one message where that cannot be done."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from lightning_rlhf.core.errors import DataError, first_line
from lightning_rlhf.core.storage import written_whole

T = TypeVar("T")
FACTS = b"lightning_rlhf"
"""Key of a file's metadata."""


def write_table(path: Path, table: pa.Table, facts: Mapping[bytes, bytes]) -> None:
    """Write a table with metadata whole or not at all.

    Raises StorageError where the disk holds no more.
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
    """What `convert` makes of the table in a file; `what` names it in an error.

    Raises DataError where the file is damaged or holds something else.
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


def entries(column: pa.ListArray) -> Tensor:
    """All that stands in the lists, one behind the other. Raises ValueError as `tensor`."""
    require_lists(column)
    return tensor(column.flatten())


def require_lists(column: pa.Array) -> None:
    """Raise ValueError where a column is not of lists."""
    if not pa.types.is_list(column.type):
        raise ValueError(f"a column of lists is of {column.type}")


def tensor(column: pa.Array) -> Tensor:
    """Of the same type. Raises ValueError where an entry is missing."""
    if column.null_count:
        raise ValueError(f"{column.null_count} numbers are missing")
    return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
