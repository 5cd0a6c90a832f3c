"""Reading of a source into checked rows, before any model or tokenizer is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, Literal, Self, TypeVar

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data.parsing import (
    DEMONSTRATION_FIELDS,
    MAX_LINE_BYTES,
    PREFERENCE_FIELDS,
    BadRow,
    Row,
    decode_row,
    is_answered,
    parse_demonstration,
    parse_preference,
    parse_prompt,
)
from lightning_rlhf.data.rows import Demonstration, Messages, Preference, Prompt
from lightning_rlhf.data.sources import NumberedRows, Unit, open_source

OnBadRow = Literal["stop", "skip"]
T = TypeVar("T")
LOOK_AHEAD = 1_000
"""Number of rows after a bad first row that are searched for a usable one."""


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


def read_demonstrations(source: str, on_bad_row: OnBadRow) -> Rows[Demonstration]:
    """Read demonstrations; from a file of preferences, the prompts with the chosen responses.

    Raises:
        DataError: the file cannot be read, has no usable row, or has a bad row while `on_bad_row`
            is "stop"; names file, line and reason.
        HubError: the Hub dataset cannot be loaded.
    """
    return _read(source, on_bad_row, parse_demonstration, DEMONSTRATION_FIELDS)


def read_preferences(source: str, on_bad_row: OnBadRow) -> Rows[Preference]:
    """Read preference pairs. Raises the same errors as `read_demonstrations`."""
    return _read(source, on_bad_row, parse_preference, PREFERENCE_FIELDS)


def read_prompts(source: str, on_bad_row: OnBadRow) -> Rows[Prompt]:
    """Read prompts from a file of any of the three kinds.

    A prompt that comes with responses is kept once, at its first occurrence; rows that hold only a
    prompt are all kept, since their other columns may differ.

    Raises the same errors as `read_demonstrations`.
    """
    read = _read(source, on_bad_row, lambda row: (parse_prompt(row), is_answered(row)), None)
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
    source: str,
    on_bad_row: OnBadRow,
    parse: Callable[[Row], T],
    columns: Collection[str] | None,
) -> Rows[T]:
    opened = open_source(source, columns)
    rows: list[T] = []
    numbers: list[int] = []
    left_out: Counter[str] = Counter()
    for number, raw in opened.rows:
        try:
            rows.append(parse(decode_row(raw)))
            numbers.append(number)
        except BadRow as bad:
            if on_bad_row == "stop":
                message = f"{source}, {opened.unit} {number}: {bad}"
                if rows or _any_usable(raw, opened.rows, parse):
                    message += ". With data.on_bad_row=skip such rows are left out and counted"
                raise DataError(message) from bad
            left_out[bad.reason] += 1
    if not rows:
        reasons = f": {counts_text(left_out)}" if left_out else ", it is empty"
        raise DataError(f"{source} holds no row that can be used{reasons}")
    return Rows(source, tuple(rows), left_out, opened.unit, tuple(numbers))


def _any_usable(bad: object, rows: NumberedRows, parse: Callable[[Row], T]) -> bool:
    """Return whether one of the LOOK_AHEAD rows after a bad one can be used.

    Returns False after a line that is too long, as the rest of that line may be of any length.
    """
    if isinstance(bad, bytes) and len(bad) > MAX_LINE_BYTES:
        return False
    for _, raw in islice(rows, LOOK_AHEAD):
        with suppress(BadRow):
            parse(decode_row(raw))
            return True
    return False
