"""From a source, a local file or a hub data set, to its raw rows."""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_rlhf.core.errors import DataError, HubError

_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
_OTHER_FILES = (".json", ".csv", ".tsv", ".txt", ".gz", ".arrow", ".zip")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

NumberedRows = Iterator[tuple[int, "bytes | dict[str, Any]"]]


@dataclass(frozen=True)
class Source:
    """The rows of a source with their numbers, from 1; a line of JSON is not decoded yet."""

    rows: NumberedRows
    unit: Literal["line", "row"]


def open_source(source: str) -> Source:
    """The rows of `path.jsonl`, `path.jsonl.gz`, `path.parquet`, `org/name` or `org/name:split`.

    A hub data set is read from its split "train" unless another is named. Blank lines of a
    JSONL file are passed over, though counted.

    Raises:
        DataError: the file is missing, cannot be read, or is of another kind.
        HubError: the data set cannot be loaded (while the rows are read).
    """
    path = Path(source).expanduser()
    if source.endswith(_ENDINGS):
        if not path.is_file():
            raise DataError(f"data file {source} does not exist")
        if source.endswith(".parquet"):
            return Source(_parquet_rows(path), "row")
        return Source(_json_lines(path), "line")
    name, _, split = source.partition(":")
    if path.exists() or path.suffix in _OTHER_FILES or not _HUB_ID.fullmatch(name):
        raise DataError(
            f"data source {source!r} is neither a file ending in {', '.join(_ENDINGS)} "
            "nor a hub data set org/name or org/name:split"
        )
    return Source(_hub_rows(name, split or "train"), "row")


def _json_lines(path: Path) -> NumberedRows:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, text
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {path} cannot be read: {error}") from error


# `datasets` is imported where it is used: it takes a second, and JSONL does without it. What it
# raises for a broken file or an unreachable hub comes from half a dozen libraries.


def _parquet_rows(path: Path) -> NumberedRows:
    import datasets

    try:
        table = datasets.load_dataset(
            "parquet", data_files=str(path), split="train", streaming=True
        )
        yield from enumerate(table, start=1)
    except Exception as error:
        raise DataError(f"data file {path} cannot be read: {_first_line(error)}") from error


def _hub_rows(name: str, split: str) -> NumberedRows:
    import datasets

    try:
        table = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise HubError(
            f"data set {name}, split {split}, cannot be loaded: {_first_line(error)}. "
            f"A local file ending in {', '.join(_ENDINGS)} can be given instead"
        ) from error
    yield from enumerate(table, start=1)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
