"""From a source, a local file or a hub data set, to its raw rows."""

from __future__ import annotations

import codecs
import gzip
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pyarrow import ArrowException, parquet

from lightning_rlhf.core.errors import DataError, HubError, first_line

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
"""How a file starts -> what it is, where its name promises lines of JSON."""

NumberedRows = Iterator[tuple[int, "bytes | dict[str, Any]"]]
Unit = Literal["line", "row"]
"""What the numbers count."""


@dataclass(frozen=True)
class Source:
    """The rows of a source with their numbers, from 1; a line of JSON is not decoded yet."""

    rows: NumberedRows
    unit: Unit


def open_source(source: str) -> Source:
    """The rows of `path.jsonl`, `path.jsonl.gz`, `path.parquet`, `org/name` or `org/name:split`.

    A hub data set is read from its split "train" unless another is named. Blank lines of a
    JSONL file are passed over, though counted.

    Raises:
        DataError: the file is missing, cannot be read, or is of another kind.
        HubError: the data set cannot be loaded (while the rows are read).
    """
    path = Path(os.path.expanduser(source))
    if source.endswith(_ENDINGS):
        if not path.is_file():
            what = "is no file" if path.exists() else "does not exist"
            raise DataError(f"data file {source} {what}")
        if source.endswith(".parquet"):
            return Source(_parquet_rows(path), "row")
        return Source(_json_lines(path), "line")
    name, _, split = source.partition(":")
    here = path.exists() or Path(name).exists()
    if here or path.suffix in _OTHER_FILES or not _HUB_ID.fullmatch(name):
        raise DataError(
            f"data source {source!r} is neither a file ending in {', '.join(_ENDINGS)} "
            "nor a hub data set org/name or org/name:split"
        )
    return Source(_hub_rows(name, split or "train"), "row")


def _json_lines(path: Path) -> NumberedRows:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    _refuse_other_forms(path, line)
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, text
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {path} cannot be read: {error}") from error


def _refuse_other_forms(path: Path, start: bytes) -> None:
    """Raise DataError where the whole file is in a form that no line of it tells."""
    for mark, form in _OTHER_FORMS:
        if start.startswith(mark):
            raise DataError(f"data file {path} is {form}")


def _parquet_rows(path: Path) -> NumberedRows:
    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=1024)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except (OSError, ArrowException) as error:
        raise DataError(f"data file {path} cannot be read: {first_line(error)}") from error


# `datasets` is imported where it is used: it takes a second, and files do without it. What it
# raises for an unreachable hub comes from half a dozen libraries.


def _hub_rows(name: str, split: str) -> NumberedRows:
    import datasets

    try:
        table = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise HubError(
            f"data set {name}, split {split}, cannot be loaded: {first_line(error)}. "
            f"A local file ending in {', '.join(_ENDINGS)} can be given instead"
        ) from error
    yield from enumerate(table, start=1)
