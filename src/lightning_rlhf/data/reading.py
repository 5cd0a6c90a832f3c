"""The form in which the rows of a source are read, found by its columns."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data.forms import AUTO, Form, Format, Kind, fitting
from lightning_rlhf.data.nearest import hint, nearest
from lightning_rlhf.data.parsing import (
    MAX_LINE_BYTES,
    BadRow,
    NumberedRows,
    Row,
    decode_row,
    has,
)
from lightning_rlhf.data.sources import Source

FIRST_ROWS = 100
"""Number of rows by whose columns the form of a source is found."""


@dataclass(frozen=True)
class Columns:
    """Format of the rows of a source, and other names that its columns have."""

    format: Format = AUTO
    names: Mapping[str, str] = field(default_factory=dict)
    """Column of the form -> column of the source that is read as it."""

    def renamed(self, row: Row) -> Row:
        """Return the row with the columns that the form reads, besides its own."""
        mapped = {
            ours: row.get(name) for ours, name in self.names.items() if name in row or ours in row
        }
        return {**row, **mapped}

    def check_found(self, source: str, found: Collection[str]) -> None:
        """Raise DataError if a column that is replaced has no replacement among those found."""
        for ours, name in self.names.items():
            if self._is_lacking(ours, name, found):
                raise DataError(
                    f"{source}: data.columns.{ours} is {name!r}, which it does not have; "
                    f"its columns are {', '.join(map(repr, found))[:200]}"
                )

    def unseen(self, found: Collection[str], optional: Collection[str]) -> Mapping[str, str]:
        """Return the names of columns that may be missing, where they are not among those found."""
        return {
            ours: name
            for ours, name in self.names.items()
            if ours in optional and name not in found
        }

    def check_optional(
        self, source: str, found: Collection[str], optional: Collection[str]
    ) -> None:
        """Raise DataError if a column that may be missing is named, and not among those found."""
        for ours, name in self.unseen(found, optional).items():
            near = difflib.get_close_matches(name, list(found), n=1)
            columns = ", ".join(map(repr, found))[:200]
            meant = f"did you mean {near[0]!r}?" if near else f"its columns are {columns}"
            raise DataError(f"{source}: data.columns.{ours} is {name!r}, which no row has; {meant}")

    def lacks(self, found: Collection[str]) -> bool:
        """Return whether a column that is replaced has no replacement among those found."""
        return any(self._is_lacking(*names, found) for names in self.names.items())

    @staticmethod
    def _is_lacking(ours: str, name: str, found: Collection[str]) -> bool:
        return ours in found and name not in found


BY_NAME = Columns()
"""The form is found by the columns, which have its names."""


@dataclass(frozen=True)
class Reading:
    """The form of a source's rows, by which each is turned into what its stage needs."""

    kind: Kind
    columns: Columns
    form: Form
    found: tuple[str, ...]
    """Columns of the source, or of its first row; empty where they fit a form."""

    def record(self, raw: bytes | Row | BadRow) -> Any:
        """Return the record of a row; of prompts, also whether the row holds more.

        Raises BadRow if it cannot be used.
        """
        row = self.columns.renamed(decode_row(raw))
        record = self.form.read(self.kind, row)
        return (record, self.form.is_answered(row)) if self.kind == "prompts" else record

    @property
    def columns_read(self) -> set[str] | None:
        """Return the columns of a table to read; None for all, which rewards may want."""
        if self.kind == "prompts":
            return None
        ours = {*self.form.columns, *self.form.also}
        return ours | {name for column, name in self.columns.names.items() if column in ours}

    @property
    def optional(self) -> tuple[str, ...]:
        """Return the columns that a row may lack, and that belong to no other form."""
        return self.form.optional(self.kind)

    @property
    def hint(self) -> str:
        """Return what to do where the columns fit no form; empty where they fit."""
        return hint(self.found, self.kind) if self.found else ""

    @property
    def found_and_hint(self) -> str:
        """Return the columns that were found before the hint."""
        names = ", ".join(map(repr, self.found))[:200]
        return f"; its columns are {names}{self.hint}" if self.found else ""


def begin(
    source: str, opened: Source, kind: Kind, columns: Columns
) -> tuple[Reading, NumberedRows]:
    """Return how the rows of a source are read, and the rows.

    The form is that of a table's columns, else of the first rows. The package's own form is taken
    if one of them has it; but not by a row that would have another form if it had a value in each
    of its columns, where another row has that form.

    Raises DataError if `columns` replaces a column of the source by one that it does not have.
    """
    if opened.names is not None:
        names = opened.names()
        columns.check_found(source, names)
        ours = [column for column, name in columns.names.items() if name in names]
        reading = _reading([*names, *ours], kind, columns)
        columns.check_optional(source, names, reading.optional)
        return reading, opened.rows(reading.columns_read)
    rows = opened.rows(None)
    head: list[tuple[int, bytes | Row | BadRow]] = []
    found: list[Reading] = []
    unsure: list[Reading] = []
    seen: dict[str, None] = {}
    for number, raw in islice(rows, FIRST_ROWS):
        head.append((number, raw))
        with suppress(BadRow):
            decoded = decode_row(raw)
            seen |= dict.fromkeys(decoded)
            row = columns.renamed(decoded)
            reading = _reading([name for name in row if has(row, name)], kind, columns)
            whole = _reading(list(row), kind, columns)
            (found if reading.form is whole.form else unsure).append(reading)
        is_own = bool(found) and not found[-1].found and found[-1].form.format == "native"
        is_own = is_own and not columns.lacks(seen)
        if is_own or (isinstance(raw, bytes) and len(raw) > MAX_LINE_BYTES):
            break  # the rest of a line that is too long may be of any length
    columns.check_found(source, seen)
    fits = [*sorted(found, key=lambda reading: reading.form.format != "native"), *unsure]
    fits.sort(key=lambda reading: bool(reading.found))
    reading = fits[0] if fits else _reading((), kind, columns)
    if columns.unseen(seen, reading.optional):
        columns.check_optional(source, _all_columns(opened), reading.optional)
    return reading, chain(head, rows)


def _all_columns(opened: Source) -> Collection[str]:
    """Return the columns of all rows of a source, each of which names its own."""
    seen: dict[str, None] = {}
    for _, raw in opened.rows(None):
        with suppress(BadRow):
            seen |= dict.fromkeys(decode_row(raw))
    return seen


def _reading(names: Collection[str], kind: Kind, columns: Columns) -> Reading:
    if form := fitting(names, columns.format, kind):
        return Reading(kind, columns, form, found=())
    # Its messages name the columns of all forms of the package's own.
    near = nearest(() if columns.format == AUTO else names, columns.format, kind)
    return Reading(kind, columns, near, found=tuple(names))
