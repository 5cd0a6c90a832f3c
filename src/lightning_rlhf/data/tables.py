"""Raw rows of tables: a Parquet file or a Hub dataset, of which only some columns are read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pyarrow import ArrowException, RecordBatch, parquet

from lightning_rlhf.core.errors import DataError, HubError, first_line
from lightning_rlhf.data.parsing import UNREAD, BadRow, NumberedRows


def parquet_names(path: Path) -> list[str]:
    """Return the columns of a Parquet file. Raises DataError if it cannot be read."""
    try:
        names: list[str] = parquet.read_schema(path).names
    except (OSError, ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"data file {path} cannot be read: {first_line(error)}") from error
    return names


def parquet_rows(path: Path, columns: Collection[str] | None) -> NumberedRows:
    """Yield the rows of a Parquet file. Raises DataError if it cannot be read."""
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            read = [name for name in names if columns is None or name in columns]
            if twice := [name for name in read if names.count(name) > 1]:
                raise DataError(f"data file {path} has two columns {twice[0]!r}")
            unread = dict.fromkeys(names, UNREAD)
            if not read:
                yield from enumerate(itertools.repeat(unread, file.metadata.num_rows), start=1)
                return
            batches = file.iter_batches(batch_size=1024, columns=read)
            rows = (row for batch in batches for row in _decoded(batch))
            for number, row in enumerate(rows, start=1):
                yield number, row if isinstance(row, BadRow) else unread | row
    except (OSError, ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"data file {path} cannot be read: {first_line(error)}") from error


def _decoded(batch: RecordBatch) -> list[dict[str, Any] | BadRow]:
    """Return a batch's rows; a row with a value that Python cannot represent is a BadRow."""
    try:
        return batch.to_pylist()
    except (ArrowException, ValueError, OverflowError):
        return [_decoded_row(batch, i) for i in range(batch.num_rows)]


def _decoded_row(batch: RecordBatch, i: int) -> dict[str, Any] | BadRow:
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[i].as_py()
        except (ArrowException, ValueError, OverflowError) as error:
            return BadRow(f"column {name!r} cannot be read", first_line(error))
    return row


# `datasets` is imported where it is used: the import takes a second, and files do not need it. Its
# errors for an unreachable Hub come from half a dozen libraries, hence `except Exception`.


def hub_table(name: str, split: str, instead: str) -> Any:
    """Load a Hub dataset.

    instead: description of the files that can be given instead, for the error.
    Raises HubError if it cannot be loaded.
    """
    import datasets

    try:
        return datasets.load_dataset(name, split=split)
    except Exception as error:
        raise HubError(
            f"data set {name}, split {split}, cannot be loaded: {first_line(error)}. "
            f"A local file ending in {instead} can be given instead"
        ) from error


def hub_rows(
    table: Callable[[], Any], name: str, split: str, columns: Collection[str] | None
) -> NumberedRows:
    """Yield the rows of a Hub dataset. Raises DataError if a value cannot be read."""
    found = table()
    read = [column for column in found.column_names if columns is None or column in columns]
    unread, number = dict.fromkeys(found.column_names, UNREAD), 0
    rows = found.select_columns(read) if read else itertools.repeat({}, len(found))
    try:
        for number, row in enumerate(rows, start=1):
            yield number, unread | row
    except (ArrowException, ValueError, OverflowError) as error:
        raise DataError(
            f"data set {name}, split {split}, row {number + 1} cannot be read: {first_line(error)}"
        ) from error
