"""Reading of a source into checked rows, before any model or tokenizer is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any, Generic, Literal, Self, TypeVar

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data.forms import Form, Kind
from lightning_rlhf.data.parsing import MAX_LINE_BYTES, BadRow, NumberedRows, UnusedRow
from lightning_rlhf.data.reading import BY_NAME, Columns, Reading, begin
from lightning_rlhf.data.rows import Demonstration, Messages, Preference, Prompt, Scored
from lightning_rlhf.data.sources import Unit, open_source

OnBadRow = Literal["stop", "skip"]
T = TypeVar("T")
LOOK_AHEAD = 1_000
"""Number of rows after a bad first row that are searched for a usable one."""
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


def read_demonstrations(
    source: str, on_bad_row: OnBadRow, columns: Columns = BY_NAME
) -> Rows[Demonstration]:
    """Read demonstrations; from a file of preferences, the prompts with the chosen responses.

    Raises:
        DataError: the file cannot be read, holds no demonstrations, has no usable row, or has a bad
            row while `on_bad_row` is "stop"; names file, line and reason.
        HubError: the Hub dataset cannot be loaded.
    """
    rows, _ = _read(source, on_bad_row, "demonstrations", columns)
    return rows


def read_preferences(
    source: str, on_bad_row: OnBadRow, columns: Columns = BY_NAME
) -> Rows[Preference]:
    """Read preference pairs. Raises the same errors as `read_demonstrations`.

    Scored responses to one prompt are paired, each with every other that has another score; the
    number of a pair is that of the row with the chosen response.
    """
    rows, form = _read(source, on_bad_row, "preferences", columns)
    return _paired(rows) if form.is_scored else rows


def read_prompts(source: str, on_bad_row: OnBadRow, columns: Columns = BY_NAME) -> Rows[Prompt]:
    """Read prompts from a file of any of the three kinds.

    A prompt that comes with responses is kept once, at its first occurrence; rows that hold only a
    prompt are all kept, since their other columns may differ.

    Raises the same errors as `read_demonstrations`.
    """
    read, _ = _read(source, on_bad_row, "prompts", columns)
    kept: list[int] = []
    seen: set[Messages] = set()
    for i, (prompt, answered) in enumerate(read.rows):
        if not answered or prompt.prompt not in seen:
            kept.append(i)
        seen.add(prompt.prompt)
    left_out = read.left_out + Counter({"repeated prompt": len(read) - len(kept)})
    prompts = tuple(read.rows[i][0] for i in kept)
    return Rows(source, prompts, left_out, read.unit, tuple(read.numbers[i] for i in kept))


def counts_text(counts: Counter[str]) -> str:
    """Return counts as text, the most frequent first: "2 broken JSON, 1 repeated prompt"."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


def _read(
    source: str, on_bad_row: OnBadRow, kind: Kind, columns: Columns
) -> tuple[Rows[Any], Form]:
    opened = open_source(source)
    reading, raw_rows = begin(source, opened, kind, columns)
    rows: list[Any] = []
    numbers: list[int] = []
    left_out: Counter[str] = Counter()
    for number, raw in raw_rows:
        try:
            rows.append(reading.record(raw))
            numbers.append(number)
        except BadRow as bad:
            if on_bad_row == "stop" and not isinstance(bad, UnusedRow):
                message = f"{source}, {opened.unit} {number}: {bad}{reading.hint}"
                if rows or _any_usable(raw, raw_rows, reading):
                    message += ". With data.on_bad_row=skip such rows are left out and counted"
                raise DataError(message) from bad
            left_out[bad.reason] += 1
    if not rows:
        reasons = f": {counts_text(left_out)}" if left_out else ", it is empty"
        raise DataError(f"{source} holds no row that can be used{reasons}{reading.found_and_hint}")
    return Rows(source, tuple(rows), left_out, opened.unit, tuple(numbers)), reading.form


def _any_usable(bad: object, rows: NumberedRows, reading: Reading) -> bool:
    """Return whether one of the LOOK_AHEAD rows after a bad one can be used.

    Returns False after a line that is too long, as the rest of that line may be of any length.
    """
    if isinstance(bad, bytes) and len(bad) > MAX_LINE_BYTES:
        return False
    for _, raw in islice(rows, LOOK_AHEAD):
        with suppress(BadRow):
            reading.record(raw)
            return True
    return False


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
