"""Raw rows of a source: a file of lines, a JSON array, CSV, Parquet, or a Hub dataset.

Texts are read by the standard library, so that every cell keeps its characters: "NA" and "007".
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from pyarrow import ArrowException, RecordBatch, parquet

from lightning_rlhf.core.errors import DataError, HubError, counted, first_line
from lightning_rlhf.data.rows import BadRow, Row

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".txt", ".parquet")
_OTHER_FILES = (".tsv", ".gz", ".arrow", ".zip")
_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""A byte that is not UTF-8, as "surrogateescape" decodes it."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
Raw = bytes | Row | BadRow
"""A line of JSON, or a row that is decoded already or cannot be."""
NumberedRows = Iterator[tuple[int, Raw]]
"""Rows of a source with their numbers, from 1."""
_UNREADABLE = (ArrowException, ValueError, OverflowError)
"""Errors of a value that Python cannot represent, such as text that is not UTF-8."""
Unit = Literal["line", "row"]
"""Unit in which the rows of a source are numbered."""
MAX_LINE_BYTES = 16 * 2**20
"""Maximum length of a line in bytes, line ending included."""
ONE_A_LINE = "allowed: one JSON object a line"
_OTHER_FORMS = (
    (codecs.BOM_UTF16_LE, "in UTF-16 or UTF-32; allowed: UTF-8"),
    (codecs.BOM_UTF16_BE, "in UTF-16; allowed: UTF-8"),
    (codecs.BOM_UTF32_BE, "in UTF-32; allowed: UTF-8"),
    (b"\x1f\x8b", "compressed; allowed: a name that ends in .jsonl.gz"),
    (b"PAR1", "Parquet; allowed: a name that ends in .parquet"),
)
"""First bytes of files in other formats, and how an error describes each."""


@dataclass(frozen=True)
class Source:
    """Rows of a source with their numbers. One that cannot be read is a BadRow with the reason."""

    unit: Unit
    rows: Callable[[Collection[str] | None], NumberedRows]
    """Function from the columns to read of a table (None: all) to the rows."""
    names: Callable[[], Sequence[str]] | None = None
    """Function that returns the columns of a table; None where each row names its own."""


def open_source(source: str) -> Source:
    """Open a file ending in `.jsonl`, `.jsonl.gz`, `.json`, `.csv`, `.txt` or `.parquet`, or the
    Hub dataset `org/name` or `org/name:split`.

    A `.json` file holds an array of objects, or JSON lines. A line of a `.txt` file is a row with
    the one column "text". A Hub dataset is read from its split "train" unless another is named.
    Blank lines are skipped but counted.

    Raises:
        DataError: the file is missing, cannot be read, or has an unknown format.
        HubError: the dataset cannot be loaded (raised while the rows are read).
    """
    path = Path(os.path.expanduser(source))
    if source.endswith(ENDINGS):
        if not path.is_file():
            what = "is no file" if path.exists() else "does not exist"
            raise DataError(f"data file {source} {what}")
        if source.endswith(".parquet"):
            return Source("row", partial(_parquet_rows, path), partial(_parquet_names, path))
        if source.endswith(".csv"):
            return Source("line", lambda columns: _csv_rows(path), partial(_csv_names, path))
        if source.endswith(".json") and next(_lines(path), (0, b""))[1].lstrip()[:1] == b"[":
            return Source("row", lambda columns: _json_rows(path))
        read = _text_rows if source.endswith(".txt") else _lines
        return Source("line", lambda columns: read(path))
    name, _, split = source.partition(":")
    here = path.exists() or Path(name).exists()
    if here or path.suffix in _OTHER_FILES or not _HUB_ID.fullmatch(name):
        raise DataError(
            f"data source {source!r} is neither a file ending in {', '.join(ENDINGS)} "
            "nor a hub data set org/name or org/name:split"
        )
    table = cache(partial(_hub_table, name, split or "train"))
    rows = partial(_hub_rows, table, f"data set {name}, split {split or 'train'}")
    return Source("row", rows, lambda: list(table().column_names))


def decode_row(raw: Raw) -> Row:
    """Return the row in one line of JSON; return a row that is already decoded unchanged.

    Raises:
        BadRow: the line is too long, not UTF-8, not JSON, or not a JSON object; or `raw` itself.
    """
    if isinstance(raw, BadRow):
        raise raw
    if not isinstance(raw, bytes):
        return raw
    text = _decoded(raw)
    try:
        row = json.loads(text.rstrip("\r\n"), object_pairs_hook=_once_each)
    except json.JSONDecodeError as error:
        where = f"{error.msg.removesuffix(' at')}, column {error.colno}"
        is_spread = raw.strip() == b"{" or raw.lstrip().startswith(b"[")
        raise BadRow("broken JSON", ONE_A_LINE if is_spread else where) from error
    except (ValueError, RecursionError) as error:  # too many digits or levels
        raise BadRow("broken JSON", str(error)) from error
    if not isinstance(row, dict):
        raise BadRow("not a JSON object", f"found {type(row).__name__}; {ONE_A_LINE}")
    return row


def _decoded(line: bytes) -> str:
    """Return the text of a line. Raises BadRow if it is too long or not UTF-8."""
    if len(line) > MAX_LINE_BYTES:
        raise BadRow("the line is too long", f"more than {MAX_LINE_BYTES:,} bytes")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", f"at byte {error.start + 1} of the line") from error


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object made of `pairs`.

    Raises BadRow if a name occurs twice, since JSON does not define which value counts.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow("a field stands twice in one object", f"found {twice!r}")
    return found


def _lines(path: Path, *, blank: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a text file with their numbers, without a byte order mark.

    A line is truncated after MAX_LINE_BYTES + 1 bytes. Blank ones are left out unless `blank`.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            number, line = 0, b"\n"
            while line:
                is_rest = not line.endswith(b"\n")  # of a truncated line
                line = file.readline(MAX_LINE_BYTES + 1)
                if is_rest or not line:
                    continue
                number += 1
                if number == 1:
                    for mark, form in _OTHER_FORMS:
                        if line.startswith(mark):
                            raise DataError(f"data file {path} is {form}")
                    line = line.removeprefix(codecs.BOM_UTF8) or b"\n"
                if blank or line.strip() or len(line) > MAX_LINE_BYTES:
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {path} cannot be read: {error}") from error


def _text_rows(path: Path) -> NumberedRows:
    """Yield a row {"text"} for each line that is not blank."""
    for number, line in _lines(path):
        try:
            yield number, {"text": _decoded(line).rstrip("\r\n")}
        except BadRow as bad:
            yield number, bad


def _json_rows(path: Path) -> NumberedRows:
    """Yield the objects of a JSON array; an element that is no object is a BadRow.

    Raises DataError where the array is not JSON, since nothing after that can be read.
    """
    try:
        elements = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=_once_each)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"data file {path}, line {line}: not UTF-8") from error
    except (ValueError, RecursionError, BadRow) as error:  # also too many digits or levels
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        why = getattr(error, "msg", str(error))
        raise DataError(f"data file {path}{where}: broken JSON ({why})") from error
    for number, row in enumerate(elements, start=1):
        bad = BadRow("not a JSON object", f"found {type(row).__name__}")
        yield number, row if isinstance(row, dict) else bad


def _csv_names(path: Path) -> list[str]:
    """Return the columns of a CSV file. Raises DataError if it cannot be read."""
    number, names = next(_csv_records(path), (0, []))
    if isinstance(names, BadRow):
        raise DataError(f"data file {path}, line {number}: {names}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"data file {path} has two columns {twice[0]!r}")
    return names


def _csv_rows(path: Path) -> NumberedRows:
    """Yield the rows of a CSV file, numbered by the lines in which they begin.

    The first row names the columns. Every value is text, and an empty one is None.
    """
    names = _csv_names(path)
    records = _csv_records(path)
    next(records, None)
    for number, cells in records:
        if isinstance(cells, BadRow):
            yield number, cells
        elif len(cells) != len(names):
            columns = counted(len(names), "column")
            found = f"found {counted(len(cells), 'cell')}, the first row names {columns}"
            yield number, BadRow("another number of cells than columns", found)
        else:
            yield number, {n: cell or None for n, cell in zip(names, cells, strict=True)}


def _csv_records(path: Path) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Yield the records of a CSV file as lists of cells, without blank lines.

    Raises DataError where a quote is never closed, since nothing after it can be read, and for a
    line that is too long.
    """

    def texts() -> Iterator[str]:
        for number, line in _lines(path, blank=True):
            if len(line) > MAX_LINE_BYTES:
                most = f"more than {MAX_LINE_BYTES:,} bytes"
                raise DataError(f"data file {path}, line {number}: the line is too long ({most})")
            yield line.decode("utf-8", "surrogateescape")

    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader(texts(), strict=True)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if reader.line_num > number:  # a quote may have been open since
                raise DataError(
                    f"data file {path}, line {number}: broken CSV ({error}); the quotes of a "
                    "cell are doubled inside it and closed at its end"
                ) from error
            yield number, BadRow("broken CSV", str(error))
            continue
        if cells is None:
            return
        if any(_NO_UTF8.search(cell) for cell in cells):
            yield number, BadRow("not UTF-8", "in a cell")
        elif cells:
            yield number, cells


def _parquet_names(path: Path) -> list[str]:
    """Return the columns of a Parquet file. Raises DataError if it cannot be read."""
    try:
        names: list[str] = parquet.read_schema(path).names
    except (OSError, ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"data file {path} cannot be read: {first_line(error)}") from error
    return names


def _parquet_rows(path: Path, columns: Collection[str] | None) -> NumberedRows:
    """Yield the rows of a Parquet file. Raises DataError if it cannot be read."""
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            read = [name for name in names if columns is None or name in columns]
            if twice := [name for name in read if names.count(name) > 1]:
                raise DataError(f"data file {path} has two columns {twice[0]!r}")
            batches = file.iter_batches(batch_size=1024, columns=read)
            rows = (row for batch in batches for row in _batch_rows(batch))
            yield from enumerate(rows, start=1)
    except (OSError, ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"data file {path} cannot be read: {first_line(error)}") from error


def _batch_rows(batch: RecordBatch) -> list[dict[str, Any] | BadRow]:
    """Return a batch's rows; a row with a value that Python cannot represent is a BadRow."""
    try:
        return batch.to_pylist()
    except _UNREADABLE as error:
        if batch.num_rows > 1:
            return [row for i in range(batch.num_rows) for row in _batch_rows(batch.slice(i, 1))]
        if batch.num_columns > 1:
            cells = [_batch_rows(batch.select([name]))[0] for name in batch.schema.names]
            return [next(cell for cell in cells if isinstance(cell, BadRow))]
        name = batch.schema.names[0]
        return [BadRow(f"column {name!r} cannot be read", first_line(error))]


def _hub_table(name: str, split: str) -> Any:
    """Load a Hub dataset. Raises HubError if it cannot be loaded."""
    import datasets  # which takes a second; files do not need it

    try:
        return datasets.load_dataset(name, split=split)
    except Exception as error:  # of half a dozen libraries, where the Hub is unreachable
        raise HubError(
            f"data set {name}, split {split}, cannot be loaded: {first_line(error)}. "
            f"A local file ending in {', '.join(ENDINGS)} can be given instead"
        ) from error


def _hub_rows(
    table: Callable[[], Any], title: str, columns: Collection[str] | None
) -> NumberedRows:
    """Yield the rows of a Hub dataset. Raises DataError if a value cannot be read."""
    found, number = table(), 0
    read = [column for column in found.column_names if columns is None or column in columns]
    try:
        for number, row in enumerate(found.select_columns(read), start=1):
            yield number, row
    except _UNREADABLE as error:
        where = f"{title}, row {number + 1}"
        raise DataError(f"{where} cannot be read: {first_line(error)}") from error
