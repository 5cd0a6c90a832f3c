"""Raw rows of a source: a local file or a Hub dataset."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data.parsing import NumberedRows
from lightning_rlhf.data.tables import hub_rows, hub_table, parquet_names, parquet_rows
from lightning_rlhf.data.text_files import csv_names, csv_rows, json_lines, json_rows, text_lines

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".txt", ".parquet")
_OTHER_FILES = (".tsv", ".gz", ".arrow", ".zip")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
Unit = Literal["line", "row"]
"""Unit in which the rows of a source are numbered."""


@dataclass(frozen=True)
class Source:
    """Rows of a source with their numbers, from 1.

    A line of JSON is not decoded yet, and is truncated after MAX_LINE_BYTES + 1 bytes. A row with a
    value that cannot be read is replaced by a BadRow that states the reason.
    """

    unit: Unit
    rows: Callable[[Collection[str] | None], NumberedRows]
    """Function from the columns to read of a table (None: all) to the rows; the values of the other
    columns are UNREAD."""
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
            return Source("row", partial(parquet_rows, path), partial(parquet_names, path))
        if source.endswith(".csv"):
            return Source("line", lambda columns: csv_rows(path), partial(csv_names, path))
        read = {".json": json_rows, ".txt": text_lines}.get(path.suffix, json_lines)
        return Source("line", lambda columns: read(path))
    name, _, split = source.partition(":")
    here = path.exists() or Path(name).exists()
    if here or path.suffix in _OTHER_FILES or not _HUB_ID.fullmatch(name):
        raise DataError(
            f"data source {source!r} is neither a file ending in {', '.join(ENDINGS)} "
            "nor a hub data set org/name or org/name:split"
        )
    split = split or "train"
    table = cache(partial(hub_table, name, split, ", ".join(ENDINGS)))
    return Source("row", partial(hub_rows, table, name, split), lambda: list(table().column_names))
