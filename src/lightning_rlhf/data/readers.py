"""Reading of a source into checked rows, and rows to train on and held-out rows of a stage.

Needs no model or tokenizer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, islice
from typing import Any, Generic, Literal, Self, TypeVar

from lightning_rlhf.core.errors import ConfigError, DataError
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.data.formats import (
    AUTO,
    NATIVE,
    NEEDS,
    Format,
    Kind,
    check_serves,
    fitting,
    formats_of,
    hint,
)
from lightning_rlhf.data.rows import (
    BadRow,
    Demonstration,
    Messages,
    Preference,
    Prompt,
    Row,
    Scored,
    UnusedRow,
    has,
)
from lightning_rlhf.data.sources import (
    MAX_LINE_BYTES,
    NumberedRows,
    Raw,
    Source,
    Unit,
    decode_row,
    open_source,
)
from lightning_rlhf.io.user_code import FAULTS, check_file, load_function

OnBadRow = Literal["stop", "skip"]
T = TypeVar("T")
S = TypeVar("S", Demonstration, Preference, Prompt)
FIRST_ROWS = 100
"""Number of rows by whose columns the format of a source is found."""
UNPAIRED = "no other response to the prompt has another score"
"""Reason for leaving out a scored response."""


@dataclass(frozen=True)
class Rows(Generic[T]):
    """Usable rows of one source, in the order of the file."""

    source: str
    rows: tuple[T, ...]
    left_out: Counter[str]
    """Number of rows of the source that are not in `rows`, by reason."""
    unit: Unit
    numbers: tuple[int, ...]
    """Number of each row in the source, in `unit`, from 1."""

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, positions: Sequence[int]) -> Self:
        """Return the rows at these positions of `rows`."""
        return replace(
            self,
            rows=tuple(self.rows[i] for i in positions),
            numbers=tuple(self.numbers[i] for i in positions),
        )


@dataclass(frozen=True)
class TrainVal(Generic[S]):
    """Rows to train on and held-out rows."""

    train: Rows[S]
    val: Rows[S]


def load(kind: Kind, config: DataConfig, seed: int) -> TrainVal[Any]:
    """Load the rows of one kind of data.

    Without a validation source, `val_fraction` of the different prompts (at least one), drawn with
    `seed`, are held out with all their rows, so that no prompt is on both sides. All validation
    rows are returned; `sample` draws `max_val_rows` of those that fit.

    Raises:
        ConfigError: no source is set.
        DataError, HubError: a source cannot be read, or has too few prompts to hold some out.
    """
    train, val = check_sources(config, kind)
    rows = read(kind, train, config.on_bad_row, config.format, config.columns)
    if val is None:
        return _hold_out(rows, config.val_fraction, seed)
    return TrainVal(rows, read(kind, val, config.on_bad_row, config.format, config.columns))


def check_sources(config: DataConfig, kind: Kind) -> tuple[str, str | None]:
    """Return the training source and the validation source, checked by their names alone.

    Raises ConfigError if there is no training source, and DataError if a file is missing, its name
    has no supported form, or data.format holds no such data; all name the key.
    """
    split, key = getattr(config, kind), f"data.{kind}"
    if split.train is None:
        raise ConfigError(f"{key}.train is not set; {NEEDS[kind]}: {key}.train=path.jsonl")
    check_serves(config.format, kind, f"{key}.train={split.train}")
    if ":" in config.format:
        check_file(config.format, "data.format")
    for part, source in (("train", split.train), ("val", split.val)):
        try:
            if source is not None:
                open_source(source)
        except DataError as error:
            raise DataError(f"{key}.{part}: {error}") from error
    return split.train, split.val


def sample(rows: Rows[S], limit: int | None, seed: int) -> Rows[S]:
    """Return `limit` of the rows, drawn with `seed`, in their order; None returns all."""
    if limit is None or len(rows) <= limit:
        return rows
    kept = sorted(random.Random(seed).sample(range(len(rows)), limit))
    left_out = rows.left_out + Counter({"over data.max_val_rows": len(rows) - limit})
    return replace(rows.only(kept), left_out=left_out)


def _hold_out(rows: Rows[S], fraction: float, seed: int) -> TrainVal[S]:
    # Texts have no prompt; each is held out by itself.
    keys = [getattr(row, "response", "") if not row.prompt else row.prompt for row in rows.rows]
    prompts = list(dict.fromkeys(keys))
    if len(prompts) == 1:
        raise DataError(
            f"{rows.source} has one prompt only, so none can be held out for validation; "
            "name a validation file under data, or give more prompts"
        )
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    held_out = set(random.Random(seed).sample(prompts, count))
    train, val = (
        rows.only([i for i, key in enumerate(keys) if (key in held_out) == side])
        for side in (False, True)
    )
    return TrainVal(train, replace(val, left_out=Counter()))  # counted in `train`


def counts_text(counts: Counter[str]) -> str:
    """Return counts as text, the most frequent first: "2 broken JSON, 1 repeated prompt"."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


def read(
    kind: Kind,
    source: str,
    on_bad_row: OnBadRow,
    format: str = AUTO,
    columns: Mapping[str, str] | None = None,
) -> Rows[Any]:
    """Read the rows of one kind of data.

    A prompt that comes with responses is kept once, at its first occurrence; rows that hold only a
    prompt are all kept, since their other columns may differ. Scored responses to one prompt are
    paired, each with every other that has another score; the number of a pair is that of the row
    with the chosen response.

    format: name of a format, or "path.py:function"; see `own_row`.
    columns: column of the format -> column of the source that is read as it.

    Raises:
        DataError: the file cannot be read, holds no such data, has no usable row, or has a bad row
            while `on_bad_row` is "stop"; names file, line and reason.
        HubError: the Hub dataset cannot be loaded.
    """
    opened = open_source(source)
    reading, raw_rows = _begin(source, opened, kind, format, columns or {})
    rows: list[Any] = []
    numbers: list[int] = []
    left_out: Counter[str] = Counter()
    prompts: set[Messages] = set()
    for number, raw in raw_rows:
        try:
            row = reading.row(raw)
            record = reading.format.read(row, kind)
            if kind == "prompts":
                if record.prompt in prompts and reading.format.is_answered(row):
                    raise UnusedRow("repeated prompt")
                prompts.add(record.prompt)
        except BadRow as bad:
            if on_bad_row == "stop" and not isinstance(bad, UnusedRow):
                advice = ". With data.on_bad_row=skip such rows are left out and counted"
                where = f"{source}, {opened.unit} {number}"
                raise DataError(f"{where}: {bad}{reading.hint or advice}") from bad
            left_out[bad.reason] += 1
        else:
            rows.append(record)
            numbers.append(number)
    if not rows:
        reasons = f": {counts_text(left_out)}" if left_out else ", it is empty"
        raise DataError(f"{source} holds no row that can be used{reasons}{reading.hint}")
    reading.check_names(source, [c for c in reading.format.also if kind != "demonstrations"])
    found = Rows(source, tuple(rows), left_out, opened.unit, tuple(numbers))
    return _paired(found) if isinstance(rows[0], Scored) else found


@dataclass(frozen=True)
class _Reading:
    """Conversion of the rows of a source into what the format reads."""

    columns: Mapping[str, str]
    """Column of the format -> column of the source that is read as it."""
    own: Callable[..., Any] | None
    """Function of the user from a row to one of the package's own form."""
    format: Format
    seen: dict[str, None] = field(default_factory=dict)
    """Columns of the source, or of its rows so far."""
    hint: str = ""
    """Text on what was found and what is allowed, where the columns fit no format."""

    def row(self, raw: Raw) -> Row:
        """Return a row with the columns that the format reads, besides its own."""
        row = decode_row(raw)
        if self.columns:
            self.seen.update(dict.fromkeys(row))
            names = self.columns.items()
            row = {**row, **{c: row.get(name) for c, name in names if name in row or c in row}}
        return row if self.own is None else own_row(self.own, row)

    def check_names(self, source: str, columns: Collection[str]) -> None:
        """Raise DataError if one of these columns is to be read from one that the source lacks."""
        for ours, name in self.columns.items():
            if ours in columns and name not in self.seen:
                there = f"its columns are {', '.join(map(repr, self.seen))[:200]}"
                raise DataError(
                    f"{source}: data.columns.{ours} is {name!r}, which no row has; {there}"
                )


def _begin(
    source: str, opened: Source, kind: Kind, format: str, columns: Mapping[str, str]
) -> tuple[_Reading, NumberedRows]:
    """Return how the rows of a source are read, and the rows.

    The format is found by the columns of a table, else by those with a value in the first rows.

    Raises DataError if `columns` replaces a column of the source by one that it does not have.
    """
    own = load_function(format, "data.format") if ":" in format else None
    reading = _Reading(columns, own, formats_of(format, kind)[0])
    names = opened.names() if opened.names else ()
    head: list[tuple[int, Raw]] = []
    rows = opened.rows(None)
    if own is not None:
        return reading, rows
    reading.seen.update(dict.fromkeys(names))
    present = dict.fromkeys([*names, *(ours for ours, name in columns.items() if name in names)])
    for number, raw in () if names else islice(rows, FIRST_ROWS):
        head.append((number, raw))
        with suppress(BadRow):
            row = reading.row(raw)
            present |= {name: None for name in row if has(row, name)}
        if isinstance(raw, bytes) and len(raw) > MAX_LINE_BYTES:
            break  # the rest of the line may be of any length
    reading.check_names(source, [*reading.seen])
    found = fitting(present, format, kind)
    if found is None:
        return replace(reading, hint=hint(present, kind) if present else ""), chain(head, rows)
    if names and kind != "prompts":
        rows = opened.rows({*found.reads, *(columns.get(name, name) for name in found.reads)})
    return replace(reading, format=found), chain(head, rows)


def own_row(function: Callable[[dict[str, Any]], Any], row: Row) -> Row:
    """Return the row in the package's own form that a user's function makes of a row.

    The function returns the turns of a dialogue, a dictionary with some columns of NATIVE, or None
    for a row to leave out; other columns stay.
    """
    try:
        found = function(dict(row))
    except FAULTS as error:
        raise BadRow("the function of data.format fails", repr(error)[:200]) from error
    if found is None:
        raise UnusedRow("the function of data.format returns None")
    found = {"messages": found} if isinstance(found, list) else found
    if not isinstance(found, dict):
        raise BadRow(
            "the function of data.format returns no row",
            f"found {type(found).__name__}; allowed: a list of messages, a dictionary, None",
        )
    return {key: value for key, value in row.items() if key not in NATIVE} | found


def _paired(read: Rows[Scored]) -> Rows[Preference]:
    """Return the pairs of responses to one prompt with different scores, in the file's order."""
    by_prompt: dict[Messages, list[int]] = {}
    for i, row in enumerate(read.rows):
        by_prompt.setdefault(row.prompt, []).append(i)
    pairs: list[Preference] = []
    numbers: list[int] = []
    used: set[int] = set()
    for positions in by_prompt.values():
        for two in combinations(positions, 2):
            better, worse = sorted(two, key=lambda i: -read.rows[i].score)
            high, low = read.rows[better], read.rows[worse]
            if high.score == low.score or high.response.strip() == low.response.strip():
                continue
            margin = high.score - low.score if high.is_graded else None
            pairs.append(Preference(high.prompt, high.response, low.response, margin))
            numbers.append(read.numbers[better])
            used.update(two)
    left_out = read.left_out + Counter({UNPAIRED: len(read) - len(used)})
    if not pairs:
        raise DataError(f"{read.source} holds no pair of responses: {counts_text(left_out)}")
    return Rows(read.source, tuple(pairs), left_out, read.unit, tuple(numbers))
