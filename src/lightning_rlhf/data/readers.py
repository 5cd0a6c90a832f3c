"""Rows of a source: a file of lines, a JSON array, CSV, Parquet or a Hub dataset; no model needed.

Texts are read by the standard library, so that every cell keeps its characters: "NA" and "007".
"""

import csv
import gzip
import json
import os
import random
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pyarrow import ArrowException, parquet

from lightning_rlhf.core.errors import ConfigError, DataError, HubError, counted, first_line
from lightning_rlhf.data import formats, rows
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.io.user_code import load_function, nearest_path, optional

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".txt", ".parquet")
FIRST_ROWS = 100
"""Number of rows by whose columns the format of a source is found."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""A byte that is not UTF-8, as "surrogateescape" decodes it."""
_UNREADABLE = (ArrowException, OSError, ValueError, OverflowError)
"""Errors of a damaged table, and of a value that Python cannot represent."""
_ONE_A_LINE = "allowed: one JSON object a line"
Numbered = Iterator[tuple[int, rows.Row | rows.BadRow]]
"""Rows of a source with their numbers, from 1; one that cannot be read is the reason why."""
S = TypeVar("S", rows.Demonstration, rows.Preference, rows.Prompt, rows.Label)


@dataclass(frozen=True)
class TrainVal(Generic[S]):
    """Rows to train on and held-out rows."""

    train: rows.Rows[S]
    val: rows.Rows[S]


def load(kind: formats.Kind, config: DataConfig, seed: int) -> TrainVal[Any]:
    """Load the rows of one kind of data.

    Without a validation source, `val_fraction` of the different prompts (at least one), drawn with
    `seed`, are held out with all their rows, so that no prompt is on both sides. All validation
    rows are returned; `draw_rows` draws `max_val_rows` of those that fit.

    Raises:
        ConfigError: no source is set.
        DataError, HubError: a source cannot be read, or has too few prompts to hold some out.
    """
    section = "preferences" if kind == "labels" else kind
    split, key = getattr(config, section), f"data.{section}"
    if split.train is None:
        raise ConfigError(f"{key}.train is not set; {formats.NEEDS[kind]}: {key}.train=path.jsonl")
    for part, source in (("train", split.train), ("val", split.val)):  # before rows are read
        if source is not None:
            _path_of(source, f"{key}.{part}")
    options = (config.on_bad_row, config.format, config.columns)
    whole = read(kind, split.train, *options)
    if split.val is not None:
        return TrainVal(whole, read(kind, split.val, *options))
    # Texts have no prompt; each is held out by itself.
    keys = [row.prompt or getattr(row, "response", "") for row in whole.rows]
    prompts = list(dict.fromkeys(keys))
    if len(prompts) == 1:
        needed = f"{key}.val, or more prompts, as one cannot be held out for validation"
        raise DataError(f"{whole.source} has one prompt only; allowed: {needed}")
    count = min(max(1, round(config.val_fraction * len(prompts))), len(prompts) - 1)
    held_out = set(random.Random(seed).sample(prompts, count))
    sides = ([i for i, k in enumerate(keys) if (k in held_out) == side] for side in (False, True))
    trained, kept = (whole.only(positions) for positions in sides)
    return TrainVal(trained, replace(kept, left_out=Counter()))  # counted in `trained`


def draw_rows(whole: rows.Rows[S], limit: int | None, seed: int) -> rows.Rows[S]:
    """Return `limit` of the rows, drawn with `seed`, in their order; None returns all."""
    if limit is None or len(whole) <= limit:
        return whole
    kept = sorted(random.Random(seed).sample(range(len(whole)), limit))
    left_out = whole.left_out + Counter({"over data.max_val_rows": len(whole) - limit})
    return replace(whole.only(kept), left_out=left_out)


def read(
    kind: formats.Kind,
    source: str,
    on_bad_row: Literal["stop", "skip"],
    format: str = formats.AUTO,
    columns: Mapping[str, str] | None = None,
) -> rows.Rows[Any]:
    """Read the rows of one kind of data.

    A prompt that comes with responses is kept once, at its first occurrence; rows that hold
    only a prompt are all kept, since their other columns may differ. Scored responses to one prompt
    are paired, each with every other that has another score; the number of a pair is that of the
    row with the chosen response. For labels, responses with one are not paired, and pairs are
    taken apart.

    format: name of a format, or "path.py:function"; see `own_row`.
    columns: column of the format -> column of the source that is read as it.

    Raises:
        DataError: the file cannot be read, holds no such data, has no usable row, or has a bad row
            while `on_bad_row` is "stop"; names file, line and reason.
        HubError: the Hub dataset cannot be loaded.
    """
    if not formats.formats_of(format, kind):
        names = dict.fromkeys(form.name for form in formats.formats_of(formats.AUTO, kind))
        lacks = f"{source}: data.format={format} holds no {kind}"
        raise DataError(f"{lacks}; allowed: {', '.join(names)}")
    columns = columns or {}
    own = load_function(format, "data.format") if ":" in format else None
    unit, form, present, raw_rows = _open(source, kind, format, columns)
    advice = ""
    records: list[Any] = []
    numbers: list[int] = []
    left_out: Counter[str] = Counter()
    prompts: set[rows.Messages] = set()
    for number, raw in raw_rows:
        try:
            row = _renamed(raw, columns)
            record = form.read(formats.own_row(own, row) if own else row, kind)
            if isinstance(record, rows.Prompt):
                if record.is_answered and record.prompt in prompts:
                    raise rows.UnusedRow("repeated prompt")
                prompts.add(record.prompt)
        except rows.BadRow as bad:
            if bad.lacks and not own and bad.lacks not in present:  # nor has any other row
                advice = advice or formats.hint(present, kind, bad.lacks)
            if on_bad_row == "stop" and not isinstance(bad, rows.UnusedRow):
                skip = ". With data.on_bad_row=skip such rows are left out and counted"
                raise DataError(f"{source}, {unit} {number}: {bad}{advice or skip}") from bad
            left_out[bad.reason] += 1
        else:
            records.append(record)
            numbers.append(number)
    if not records:
        reasons = f": {rows.counts_text(left_out)}" if left_out else ", it is empty"
        raise DataError(f"{source} holds no row that can be used{reasons}{advice}")
    found = rows.Rows(source, tuple(records), left_out, unit, tuple(numbers))
    if isinstance(records[0], rows.Scored) and (kind != "labels" or records[0].is_graded):
        found = rows.paired(found)
    return rows.labelled(found) if kind == "labels" else found


def _open(
    source: str, kind: formats.Kind, format: str, columns: Mapping[str, str]
) -> tuple[rows.Unit, formats.Format, list[str], Numbered]:
    """Return the unit of a source's rows, their format, the columns with a value, and the rows.

    The format is found by the columns of a table, else by those with a value in the first rows.

    Raises DataError if `columns` reads a column as one that the format needs, or in place of one of
    the source, and the source does not have it.
    """
    unit, names, open_rows = open_source(source)
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{source} has two columns {twice[0]!r}")
    numbered = open_rows(None)
    head = [] if names else list(islice(numbered, FIRST_ROWS))
    first = [row for _, row in head if not isinstance(row, rows.BadRow)]
    seen = dict.fromkeys(chain(names, *first))
    cells = chain.from_iterable(_renamed(row, columns).items() for row in first)
    filled = {name for name, value in cells if value is not None}
    filled |= {name for name in (*seen, *columns) if columns.get(name, name) in names}
    present = [name for name in (*seen, *columns) if name in filled]
    fit = None if ":" in format else formats.fitting(present, format, kind)
    read_columns = (*fit.needed(kind), *fit.also, *seen) if fit else columns
    for ours, name in columns.items():
        if seen and name not in seen and ours in read_columns:
            there = f"its columns are {', '.join(map(repr, seen))[:200]}"
            raise DataError(f"{source}: data.columns.{ours} is {name!r}, which no row has; {there}")
    if fit and names and kind != "prompts":  # of which a reward may want any column
        numbered = open_rows({*fit.reads, *(columns.get(name, name) for name in fit.reads)})
    return unit, fit or formats.formats_of(format, kind)[0], present, chain(head, numbered)


def _renamed(row: rows.Row | rows.BadRow, columns: Mapping[str, str]) -> rows.Row:
    """Return a row with the columns that the format reads, besides its own; raise a BadRow."""
    if isinstance(row, rows.BadRow):
        raise row
    found = {c: row.get(name) for c, name in columns.items() if name in row or c in row}
    return {**row, **found} if columns else row


def _path_of(source: str, name: str = "data source") -> Path | None:
    """Return the path of a file, or None for a Hub dataset `org/name` or `org/name:split`.

    Raises DataError with `name` if the file is missing, or the source is neither.
    """
    path = Path(os.path.expanduser(source))
    if source.endswith(ENDINGS):
        if not path.is_file():
            what = "is no file" if path.exists() else "does not exist"
            raise DataError(f"{name}: {source} {what}{nearest_path(source)}")
        return path
    hub_id, is_file = source.partition(":")[0], path.suffix in (".tsv", ".gz", ".arrow", ".zip")
    if is_file or path.exists() or Path(hub_id).exists() or not _HUB_ID.fullmatch(hub_id):
        allowed = f"a file ending in {', '.join(ENDINGS)}, or a hub data set org/name[:split]"
        here = f"; {hub_id} is a path here" if Path(hub_id).exists() else ""
        raise DataError(f"{name} is {source!r}; allowed: {allowed}{here}")
    return None


def open_source(
    source: str,
) -> tuple[rows.Unit, Sequence[str], Callable[[Collection[str] | None], Numbered]]:
    """Return the unit of a source's rows, the columns of a table, and a function to the rows.

    A `.json` file holds an array of objects, or JSON lines. A line of a `.txt` file is a row with
    the one column "text". A Hub dataset is read from its split "train" unless another is named.
    Blank lines are skipped but counted. The function takes the columns to read of a table.

    Raises DataError for a file that cannot be read, and HubError for a data set.
    """
    path = _path_of(source)
    if path is None:
        datasets = optional("datasets", "hub", f"data set {source}")
        name, _, split = source.partition(":")
        try:
            table = datasets.load_dataset(name, split=split or "train")
        except Exception as error:  # of half a dozen libraries, where the Hub is unreachable
            what = f"data set {name}, split {split or 'train'}, cannot be loaded"
            instead = f"a local file ending in {', '.join(ENDINGS)} can be given instead"
            raise HubError(f"{what}: {first_line(error)}; {instead}") from error
        names = table.column_names
        return "row", names, partial(_table, source, names, table.select_columns)
    if source.endswith(".parquet"):
        try:
            file = parquet.ParquetFile(path)
        except _UNREADABLE as error:
            raise DataError(f"data file {path} cannot be read: {first_line(error)}") from error
        names = file.schema_arrow.names

        def open_rows(columns: list[str]) -> Iterable[rows.Row]:
            batches = file.iter_batches(batch_size=1024, columns=columns)
            return chain.from_iterable(batch.to_pylist() for batch in batches)

        return "row", names, partial(_table, source, names, open_rows)
    if source.endswith(".csv"):
        cells = _csv_rows(path)
        number, names = next(cells, (1, []))
        if isinstance(names, rows.BadRow):
            raise DataError(f"data file {path}, line {number}: {names}")
        return "line", names, lambda columns: cells
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
                if blank or line.strip(" \t\n\r\v\f"):
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {path} cannot be read: {error}") from error


def _text_row(line: str) -> rows.Row | rows.BadRow:
    """Return the row {"text"} of a line; a BadRow if it is not UTF-8."""
    if not line.isascii() and (found := _NO_UTF8.search(line)):
        byte = len(line[: found.start()].encode()) + 1
        where = f"at byte {byte} of the line; allowed: UTF-8, not UTF-16 or such"
        return rows.BadRow("not UTF-8", where)
    return {"text": line.rstrip("\r\n")}


def _json_row(line: str) -> rows.Row | rows.BadRow:
    """Return the object in a line of JSON; a BadRow if it is not UTF-8, no JSON, or no object."""
    text = _text_row(line)
    if isinstance(text, rows.BadRow):
        return text
    try:
        row = json.loads(text["text"], object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:  # also too many digits or levels
        where = str(error)
        if isinstance(error, json.JSONDecodeError):
            where = f"{error.msg.removesuffix(' at')}, column {error.colno}"
        return rows.BadRow("broken JSON", f"{where}; {_ONE_A_LINE}")
    if not isinstance(row, dict):
        return rows.BadRow("not a JSON object", f"found {type(row).__name__}; {_ONE_A_LINE}")
    return row


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object made of `pairs`.

    Raises ValueError if a name occurs twice, since JSON does not define which value counts.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the field {twice!r} stands twice in one object")
    return found


def _array_rows(path: Path) -> Numbered:
    """Yield the objects of a JSON array; an element that is no object is a BadRow.

    Raises DataError where the array is not JSON, since nothing after that can be read.
    """
    lines = list(_lines(path, blank=True))
    if spoilt := [number for number, line in lines if _NO_UTF8.search(line)]:
        raise DataError(f"data file {path}, line {spoilt[0]}: not UTF-8")
    try:
        elements = json.loads("".join(line for _, line in lines), object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:  # also too many digits or levels
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        why = getattr(error, "msg", str(error))
        raise DataError(f"data file {path}{line}: broken JSON ({why})") from error
    for number, row in enumerate(elements, start=1):
        bad = rows.BadRow("not a JSON object", f"found {type(row).__name__}")
        yield number, row if isinstance(row, dict) else bad


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the names of the columns of a CSV file, then its rows, without blank lines.

    Rows are numbered by the lines in which they begin. Every value is text, and an empty one is
    None. Raises DataError where a quote is never closed, since nothing after it can be read.
    """
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader((line for _, line in _lines(path, blank=True)), strict=True)
    names: list[str] = []
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if reader.line_num > number:  # a quote may have been open since
                hint = "the quotes of a cell are doubled inside it and closed at its end"
                where = f"data file {path}, line {number}"
                raise DataError(f"{where}: broken CSV ({error}); {hint}") from error
            yield number, rows.BadRow("broken CSV", str(error))
            continue
        if cells is None:
            return
        if any(map(_NO_UTF8.search, cells)):
            yield number, rows.BadRow("not UTF-8", "in a cell")
        elif cells and not names:
            names = cells
            yield number, names
        elif cells and len(cells) != len(names):
            found = f"found {len(cells)}, the first row names {counted(len(names), 'column')}"
            yield number, rows.BadRow("another number of cells than columns", found)
        elif cells:
            yield number, {n: cell or None for n, cell in zip(names, cells, strict=True)}


def _table(
    source: str,
    names: Sequence[str],
    open_rows: Callable[[list[str]], Iterable[rows.Row]],
    columns: Collection[str] | None,
) -> Numbered:
    """Yield the rows of a table, of some or of all columns.

    Raises DataError at a row that cannot be read, or near it, as files hold rows in groups.
    """
    number = 0
    try:
        kept = [name for name in names if columns is None or name in columns]
        for number, row in enumerate(open_rows(kept), start=1):
            yield number, row
    except _UNREADABLE as error:
        after = f"{source}, after row {number}, cannot be read"
        raise DataError(f"{after}: {first_line(error)}") from error
