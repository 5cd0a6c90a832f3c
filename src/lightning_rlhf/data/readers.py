"""Reading of a source into checked rows, and rows to train on and held-out rows of a stage.

Needs no model or tokenizer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
)
from lightning_rlhf.data.sources import Numbered, Unit, file_of, open_source
from lightning_rlhf.io.user_code import FAULTS, check_file, load_function

FIRST_ROWS = 100
"""Number of rows by whose columns the format of a source is found."""
UNPAIRED = "no other response to the prompt has another score"
"""Reason for leaving out a scored response."""
OnBadRow = Literal["stop", "skip"]
T = TypeVar("T")
S = TypeVar("S", Demonstration, Preference, Prompt)


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
    if val is not None:
        return TrainVal(rows, read(kind, val, config.on_bad_row, config.format, config.columns))
    # Texts have no prompt; each is held out by itself.
    keys = [getattr(row, "response", "") if not row.prompt else row.prompt for row in rows.rows]
    prompts = list(dict.fromkeys(keys))
    if len(prompts) == 1:
        raise DataError(
            f"{rows.source} has one prompt only, so none can be held out for validation; "
            "name a validation file under data, or give more prompts"
        )
    count = min(max(1, round(config.val_fraction * len(prompts))), len(prompts) - 1)
    held_out = set(random.Random(seed).sample(prompts, count))
    sides = ([i for i, k in enumerate(keys) if (k in held_out) == side] for side in (False, True))
    trained, kept = (rows.only(positions) for positions in sides)
    return TrainVal(trained, replace(kept, left_out=Counter()))  # counted in `trained`


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
                file_of(source)
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
    columns = columns or {}
    own = load_function(format, "data.format") if ":" in format else None
    unit, form, advice, raw_rows = _open(source, kind, format, columns)
    rows: list[Any] = []
    numbers: list[int] = []
    left_out: Counter[str] = Counter()
    prompts: set[Messages] = set()
    for number, raw in raw_rows:
        try:
            row = renamed(raw, columns)
            row = row if own is None else own_row(own, row)
            record = form.read(row, kind)
            if kind == "prompts":
                if record.prompt in prompts and form.is_answered(row):
                    raise UnusedRow("repeated prompt")
                prompts.add(record.prompt)
        except BadRow as bad:
            if on_bad_row == "stop" and not isinstance(bad, UnusedRow):
                skip = ". With data.on_bad_row=skip such rows are left out and counted"
                raise DataError(f"{source}, {unit} {number}: {bad}{advice or skip}") from bad
            left_out[bad.reason] += 1
        else:
            rows.append(record)
            numbers.append(number)
    if not rows:
        reasons = f": {counts_text(left_out)}" if left_out else ", it is empty"
        raise DataError(f"{source} holds no row that can be used{reasons}{advice}")
    found = Rows(source, tuple(rows), left_out, unit, tuple(numbers))
    return _paired(found) if isinstance(rows[0], Scored) else found


def renamed(row: Row | BadRow, columns: Mapping[str, str]) -> Row:
    """Return a row with the columns that the format reads, besides its own; raise a BadRow."""
    if isinstance(row, BadRow):
        raise row
    found = {c: row.get(name) for c, name in columns.items() if name in row or c in row}
    return {**row, **found}


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


def _open(
    source: str, kind: Kind, format: str, columns: Mapping[str, str]
) -> tuple[Unit, Format, str, Numbered]:
    """Return the unit of a source's rows, their format, what to say of a bad row, and the rows.

    The format is found by the columns of a table, else by those with a value in the first rows.

    Raises DataError if `columns` reads a column as one that the format needs, or in place of one of
    the source, and the source does not have it.
    """
    unit, names, open_rows = open_source(source)
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{source} has two columns {twice[0]!r}")
    rows = open_rows(None)
    head = [] if names else list(islice(rows, FIRST_ROWS))
    seen, present = dict.fromkeys(names), dict.fromkeys(names)
    present |= {ours: None for ours, name in columns.items() if name in names}
    for row in (row for _, row in head if not isinstance(row, BadRow)):
        seen |= dict.fromkeys(row)
        present |= {
            name: None for name, value in renamed(row, columns).items() if value is not None
        }
    is_own = ":" in format
    form = None if is_own else fitting(present, format, kind)
    read_columns = columns if form is None else (*form.needed(kind), *form.also, *seen)
    for ours, name in columns.items():
        if seen and name not in seen and ours in read_columns:
            there = f"its columns are {', '.join(map(repr, seen))[:200]}"
            raise DataError(f"{source}: data.columns.{ours} is {name!r}, which no row has; {there}")
    if names and form is not None and kind != "prompts":
        rows = open_rows({*form.reads, *(columns.get(name, name) for name in form.reads)})
    advice = hint(present, kind) if form is None and present and not is_own else ""
    return unit, form or formats_of(format, kind)[0], advice, chain(head, rows)
