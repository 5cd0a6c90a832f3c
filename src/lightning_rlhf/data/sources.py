"""Raw rows of a source: a local file or a Hub dataset."""

from __future__ import annotations

import codecs
import gzip
import itertools
import os
import re
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pyarrow import ArrowException, RecordBatch, parquet

from lightning_rlhf.core.errors import DataError, HubError, first_line
from lightning_rlhf.data.parsing import MAX_LINE_BYTES, UNREAD, BadRow

_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
_OTHER_FILES = (".json", ".csv", ".tsv", ".txt", ".gz", ".arrow", ".zip")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_OTHER_FORMS = (
    (codecs.BOM_UTF16_LE, "in UTF-16 or UTF-32; allowed: UTF-8"),
    (codecs.BOM_UTF16_BE, "in UTF-16; allowed: UTF-8"),
    (codecs.BOM_UTF32_BE, "in UTF-32; allowed: UTF-8"),
    (b"\x1f\x8b", "compressed; allowed: a name that ends in .jsonl.gz"),
    (b"PAR1", "Parquet; allowed: a name that ends in .parquet"),
)
"""First bytes of files in other formats, and how an error describes each, for names that promise
JSON lines."""

NumberedRows = Iterator[tuple[int, "bytes | dict[str, Any] | BadRow"]]
Unit = Literal["line", "row"]
"""Unit in which the rows of a source are numbered."""


@dataclass(frozen=True)
class Source:
    """Rows of a source with their numbers, from 1.

    A line of JSON is not decoded yet, and is truncated after MAX_LINE_BYTES + 1 bytes. A row with a
    value that cannot be read is replaced by a BadRow that states the reason.
    """

    rows: NumberedRows
    unit: Unit


def open_source(source: str, columns: Collection[str] | None) -> Source:
    """Open `path.jsonl`, `path.jsonl.gz`, `path.parquet`, `org/name` or `org/name:split`.

    A Hub dataset is read from its split "train" unless another is named. Blank lines of a JSONL
    file are skipped but counted.

    Args:
        source: path of a file, or name of a Hub dataset.
        columns: columns of a table to read; the values of the others are UNREAD. None reads all.

    Raises:
        DataError: the file is missing, cannot be read, or has an unknown format.
        HubError: the dataset cannot be loaded (raised while the rows are read).
    """
    path = Path(os.path.expanduser(source))
    if source.endswith(_ENDINGS):
        if not path.is_file():
            what = "is no file" if path.exists() else "does not exist"
            raise DataError(f"data file {source} {what}")
        if source.endswith(".parquet"):
            return Source(_parquet_rows(path, columns), "row")
        return Source(_json_lines(path), "line")
    name, _, split = source.partition(":")
    here = path.exists() or Path(name).exists()
    if here or path.suffix in _OTHER_FILES or not _HUB_ID.fullmatch(name):
        raise DataError(
            f"data source {source!r} is neither a file ending in {', '.join(_ENDINGS)} "
            "nor a hub data set org/name or org/name:split"
        )
    return Source(_hub_rows(name, split or "train", columns), "row")


def _json_lines(path: Path) -> NumberedRows:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            number, line = 0, b"\n"
            while line:
                is_rest = not line.endswith(b"\n")  # of a truncated line
                line = file.readline(MAX_LINE_BYTES + 1)
                if is_rest:
                    continue
                number += 1
                if number == 1:
                    _refuse_other_forms(path, line)
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip() or len(line) > MAX_LINE_BYTES:
                    yield number, text
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {path} cannot be read: {error}") from error


def _refuse_other_forms(path: Path, start: bytes) -> None:
    """Raise DataError if the file starts with the first bytes of another format."""
    for mark, form in _OTHER_FORMS:
        if start.startswith(mark):
            raise DataError(f"data file {path} is {form}")


def _parquet_rows(path: Path, columns: Collection[str] | None) -> NumberedRows:
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


def _hub_rows(name: str, split: str, columns: Collection[str] | None) -> NumberedRows:
    import datasets

    try:
        table = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise HubError(
            f"data set {name}, split {split}, cannot be loaded: {first_line(error)}. "
            f"A local file ending in {', '.join(_ENDINGS)} can be given instead"
        ) from error
    read = [column for column in table.column_names if columns is None or column in columns]
    unread, number = dict.fromkeys(table.column_names, UNREAD), 0
    rows = table.select_columns(read) if read else itertools.repeat({}, len(table))
    try:
        for number, row in enumerate(rows, start=1):
            yield number, unread | row
    except (ArrowException, ValueError, OverflowError) as error:
        raise DataError(
            f"data set {name}, split {split}, row {number + 1} cannot be read: {first_line(error)}"
        ) from error
