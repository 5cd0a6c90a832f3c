"""Raw rows of text files: JSON lines, JSON arrays, CSV, and one text a line."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.core.wording import counted
from lightning_rlhf.data.parsing import MAX_LINE_BYTES, BadRow, NumberedRows, once_each

_SPACE = re.compile(r"[ \t\r\n]*")
_OTHER_FORMS = (
    (codecs.BOM_UTF16_LE, "in UTF-16 or UTF-32; allowed: UTF-8"),
    (codecs.BOM_UTF16_BE, "in UTF-16; allowed: UTF-8"),
    (codecs.BOM_UTF32_BE, "in UTF-32; allowed: UTF-8"),
    (b"\x1f\x8b", "compressed; allowed: a name that ends in .jsonl.gz"),
    (b"PAR1", "Parquet; allowed: a name that ends in .parquet"),
)
"""First bytes of files in other formats, and how an error describes each, for names that promise
text."""


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a text file with their numbers, without a byte order mark.

    A line is truncated after MAX_LINE_BYTES + 1 bytes.
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
                    _refuse_other_forms(path, line)
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {path} cannot be read: {error}") from error


def _refuse_other_forms(path: Path, start: bytes) -> None:
    """Raise DataError if the file starts with the first bytes of another format."""
    for mark, form in _OTHER_FORMS:
        if start.startswith(mark):
            raise DataError(f"data file {path} is {form}")


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank."""
    for number, line in _lines(path):
        if line.strip() or len(line) > MAX_LINE_BYTES:
            yield number, line


def text_lines(path: Path) -> NumberedRows:
    """Yield a row {"text"} for each line that is not blank."""
    for number, line in json_lines(path):
        text = _decoded_line(line)
        yield number, text if isinstance(text, BadRow) else {"text": text.rstrip("\r\n")}


def _decoded_line(line: bytes) -> str | BadRow:
    if len(line) > MAX_LINE_BYTES:
        return BadRow("the line is too long", f"more than {MAX_LINE_BYTES:,} bytes")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRow("not UTF-8", f"at byte {error.start + 1} of the line")


def json_rows(path: Path) -> NumberedRows:
    """Yield the objects of a JSON array, numbered by the lines in which they begin.

    A file that does not begin with "[" holds JSON lines. An element that is no object is a BadRow.
    Raises DataError for an element that is not JSON, since nothing after it can be read.
    """
    first = next(json_lines(path), None)
    if first is None or not first[1].lstrip().startswith(b"["):
        yield from json_lines(path)
        return
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"data file {path}, line {line}: not UTF-8") from error
    line, counted = 1, 0
    try:
        for start, element in _elements(text):
            line, counted = line + text.count("\n", counted, start), start
            yield line, element
    except _BrokenError as error:
        line += text.count("\n", counted, error.position)
        raise DataError(f"data file {path}, line {line}: broken JSON ({error})") from error


class _BrokenError(Exception):
    """Raised for text that is no JSON array."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.position = position


def _elements(text: str) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield the elements of a JSON array with the positions at which they begin."""
    decoder, lenient = json.JSONDecoder(object_pairs_hook=once_each), json.JSONDecoder()

    def skipped(position: int) -> int:
        """Return the position of the first character from `position` on that is no white space."""
        found = _SPACE.match(text, position)
        return found.end() if found else position

    def decoded(position: int) -> tuple[Any, int]:
        try:
            return decoder.raw_decode(text, position)
        except BadRow as bad:
            return bad, lenient.raw_decode(text, position)[1]

    position = skipped(skipped(0) + 1)
    is_open = text[position : position + 1] != "]"
    while is_open:
        start = position
        try:
            element, end = decoded(start)
        except json.JSONDecodeError as error:
            raise _BrokenError(error.msg, error.pos) from error
        except (ValueError, RecursionError) as error:  # too many digits or levels
            raise _BrokenError(str(error), start) from error
        if not isinstance(element, dict | BadRow):
            element = BadRow("not a JSON object", f"found {type(element).__name__}")
        yield start, element
        position = skipped(end)
        following = text[position : position + 1]
        if following not in (",", "]"):
            raise _BrokenError('an element is followed by neither "," nor "]"', position)
        is_open = following == ","
        position = skipped(position + 1) if is_open else position
    if rest := text[position + 1 :].strip():
        raise _BrokenError(f"found {rest[:20]!r} after the array", position)


def csv_names(path: Path) -> list[str]:
    """Return the columns of a CSV file. Raises DataError if it cannot be read."""
    first = next(_csv_records(path), None)
    if first is None:
        return []
    number, names = first
    if isinstance(names, BadRow):
        raise DataError(f"data file {path}, line {number}: {names}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"data file {path} has two columns {twice[0]!r}")
    return names


def csv_rows(path: Path) -> NumberedRows:
    """Yield the rows of a CSV file, numbered by the lines in which they begin.

    The first row names the columns. Every value is text, and an empty one is None.
    """
    names = csv_names(path)
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

    Raises DataError where a quote is never closed, since nothing after it can be read.
    """
    bad: list[BadRow] = []
    taken, is_at_end = 0, False  # bytes since the record began

    def lines() -> Iterator[str]:
        nonlocal taken, is_at_end
        for _, line in _lines(path):
            taken += len(line)
            text = _decoded_line(line)
            if isinstance(text, BadRow):
                bad.append(text)
                # Its quotes and cells still count; those of a truncated line are not known.
                is_whole = len(line) <= MAX_LINE_BYTES
                text = line.decode("utf-8", errors="replace") if is_whole else "\n"
            yield text
        is_at_end = True

    reader = csv.reader(lines(), strict=True)
    limit = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        while True:
            number, taken = reader.line_num + 1, 0
            bad.clear()
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if is_at_end or taken > MAX_LINE_BYTES:
                    raise DataError(
                        f"data file {path}, line {number}: broken CSV ({error}); the quotes of a "
                        "cell are doubled inside it and closed at its end"
                    ) from error
                yield number, BadRow("broken CSV", str(error))
                continue
            if bad:
                yield number, bad[0]
            elif cells:
                yield number, cells
    finally:
        csv.field_size_limit(limit)
