"""Raw rows of a source: a file of lines, a JSON array, CSV, Parquet, or a Hub dataset.

Texts are read by the standard library, so that every cell keeps its characters: "NA" and "007".
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pyarrow import ArrowException, parquet

from lightning_rlhf.core.errors import DataError, HubError, counted, first_line
from lightning_rlhf.data.rows import BadRow, Row

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".txt", ".parquet")
_OTHER_FILES = (".tsv", ".gz", ".arrow", ".zip")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""A byte that is not UTF-8, as "surrogateescape" decodes it."""
_BLANK = " \t\n\r\v\f"
_UNREADABLE = (ArrowException, OSError, ValueError, OverflowError)
"""Errors of a damaged table, and of a value that Python cannot represent."""
_ONE_A_LINE = "allowed: one JSON object a line"
Unit = Literal["line", "row"]
"""Unit in which the rows of a source are numbered."""
Numbered = Iterator[tuple[int, Row | BadRow]]
"""Rows of a source with their numbers, from 1; one that cannot be read is the reason why."""
_Table = tuple[Sequence[str], Callable[[list[str]], Iterable[Row]]]
"""Columns of a table, and a function from the columns to read to the rows."""


def file_of(source: str) -> Path | None:
    """Return the path of a file, or None for a Hub dataset `org/name` or `org/name:split`.

    Raises DataError if the file is missing, or the name is neither.
    """
    path = Path(os.path.expanduser(source))
    if source.endswith(ENDINGS):
        if not path.is_file():
            what = "is no file" if path.exists() else "does not exist"
            raise DataError(f"data file {source} {what}")
        return path
    name = source.partition(":")[0]
    here = path.exists() or Path(name).exists()
    if here or path.suffix in _OTHER_FILES or not _HUB_ID.fullmatch(name):
        raise DataError(
            f"data source {source!r} is neither a file ending in {', '.join(ENDINGS)} "
            "nor a hub data set org/name or org/name:split"
        )
    return None


def open_source(
    source: str,
) -> tuple[Unit, Sequence[str], Callable[[Collection[str] | None], Numbered]]:
    """Return the unit of a source's rows, the columns of a table, and a function to the rows.

    A `.json` file holds an array of objects, or JSON lines. A line of a `.txt` file is a row with
    the one column "text". A Hub dataset is read from its split "train" unless another is named.
    Blank lines are skipped but counted. The function takes the columns to read of a table.
    """
    path = file_of(source)
    if path is None or source.endswith(".parquet"):
        names, open_rows = _hub_table(source) if path is None else _parquet_table(path)
        return (
            "row",
            names,
            lambda columns: _table_rows(
                source, open_rows([name for name in names if columns is None or name in columns])
            ),
        )
    if source.endswith(".csv"):
        number, header = next(_csv_records(path), (1, []))
        if isinstance(header, BadRow):
            raise DataError(f"data file {path}, line {number}: {header}")
        return "line", header, lambda columns: _csv_rows(path, header)
    if source.endswith(".json") and next(_lines(path), (0, ""))[1].lstrip().startswith("["):
        return "row", (), lambda columns: _array_rows(path)
    row_of = _text_row if source.endswith(".txt") else _json_row
    return "line", (), lambda columns: ((n, row_of(line)) for n, line in _lines(path))


def _lines(path: Path, *, blank: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers, without a byte order mark.

    A byte that is not UTF-8 becomes half a surrogate pair. Blank lines are left out unless `blank`.
    """
    form: Any = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": "\n"}
    try:
        with gzip.open(path, "rt", **form) if path.suffix == ".gz" else path.open(**form) as file:
            for number, line in enumerate(file, start=1):
                if blank or line.strip(_BLANK):
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {path} cannot be read: {error}") from error


def _checked(line: str) -> str:
    """Return a line without its end. Raises BadRow if it was not UTF-8."""
    if found := _NO_UTF8.search(line):
        byte = len(line[: found.start()].encode()) + 1
        raise BadRow("not UTF-8", f"at byte {byte} of the line; allowed: UTF-8, not UTF-16 or such")
    return line.rstrip("\r\n")


def _text_row(line: str) -> Row | BadRow:
    """Return the row {"text"} of a line."""
    try:
        return {"text": _checked(line)}
    except BadRow as bad:
        return bad


def _json_row(line: str) -> Row | BadRow:
    """Return the object in a line of JSON; a BadRow if it is not UTF-8, no JSON, or no object."""
    try:
        row = json.loads(_checked(line), object_pairs_hook=_once_each)
    except BadRow as bad:
        return bad
    except json.JSONDecodeError as error:
        where = f"{error.msg.removesuffix(' at')}, column {error.colno}"
        is_spread = line.strip() == "{" or line.lstrip().startswith("[")
        return BadRow("broken JSON", _ONE_A_LINE if is_spread else where)
    except (ValueError, RecursionError) as error:  # too many digits or levels
        return BadRow("broken JSON", str(error))
    if not isinstance(row, dict):
        return BadRow("not a JSON object", f"found {type(row).__name__}; {_ONE_A_LINE}")
    return row


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


def _array_rows(path: Path) -> Numbered:
    """Yield the objects of a JSON array; an element that is no object is a BadRow.

    Raises DataError where the array is not JSON, since nothing after that can be read.
    """
    where = f"data file {path}"
    lines = []
    for number, line in _lines(path, blank=True):
        if _NO_UTF8.search(line):
            raise DataError(f"{where}, line {number}: not UTF-8")
        lines.append(line)
    try:
        elements = json.loads("".join(lines), object_pairs_hook=_once_each)
    except (ValueError, RecursionError, BadRow) as error:  # also too many digits or levels
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        why = getattr(error, "msg", str(error))
        raise DataError(f"{where}{line}: broken JSON ({why})") from error
    for number, row in enumerate(elements, start=1):
        bad = BadRow("not a JSON object", f"found {type(row).__name__}")
        yield number, row if isinstance(row, dict) else bad


def _csv_rows(path: Path, names: Sequence[str]) -> Numbered:
    """Yield the rows of a CSV file, numbered by the lines in which they begin.

    Every value is text, and an empty one is None.
    """
    for number, cells in islice(_csv_records(path), 1, None):
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

    Raises DataError where a quote is never closed, since nothing after it can be read.
    """
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader((line for _, line in _lines(path, blank=True)), strict=True)
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


def _parquet_table(path: Path) -> _Table:
    try:
        return parquet.read_schema(path).names, partial(_parquet_rows, path)
    except _UNREADABLE as error:
        raise DataError(f"data file {path} cannot be read: {first_line(error)}") from error


def _parquet_rows(path: Path, columns: list[str]) -> Iterator[Row]:
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            try:
                rows = batch.to_pylist()
            except _UNREADABLE:  # one by one, up to the row that cannot be read
                rows = (batch.slice(i, 1).to_pylist()[0] for i in range(batch.num_rows))
            yield from rows


def _hub_table(source: str) -> _Table:
    """Load a Hub dataset. Raises HubError if it cannot be loaded."""
    import datasets  # which takes a second; files do not need it

    name, _, split = source.partition(":")
    try:
        table = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # of half a dozen libraries, where the Hub is unreachable
        raise HubError(
            f"data set {name}, split {split or 'train'}, cannot be loaded: {first_line(error)}. "
            f"A local file ending in {', '.join(ENDINGS)} can be given instead"
        ) from error
    return list(table.column_names), table.select_columns


def _table_rows(source: str, rows: Iterable[Row]) -> Numbered:
    """Yield the rows of a table. Raises DataError at one that cannot be read."""
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield number, row
    except _UNREADABLE as error:
        raise DataError(
            f"{source}, row {number + 1} cannot be read: {first_line(error)}"
        ) from error
