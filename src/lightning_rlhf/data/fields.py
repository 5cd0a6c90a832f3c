"""Texts, numbers and labels in the fields of a row."""

from __future__ import annotations

import math

from lightning_rlhf.data.parsing import BadRow, Row, checked_text, has, missing
from lightning_rlhf.data.rows import Message, Messages


def text_in(row: Row, field: str) -> str:
    """Return the text in a field. Raises BadRow if it is missing, of another type or unusable."""
    if not has(row, field):
        raise missing(field, row, f"{field!r} is a text")
    if not isinstance(row[field], str):
        raise BadRow(f"field '{field}' is not text", f"found {type(row[field]).__name__}")
    return checked_text(row[field], field)


def number_in(row: Row, field: str) -> float:
    """Return the number in a field, also of a text such as "3.5", which a CSV file holds.

    Raises BadRow if it is not a finite number.
    """
    value = row.get(field)
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadRow(f"field '{field}' is not a number", f"found {str(value)[:40]!r}")
    return number


def flag_in(row: Row, field: str) -> bool:
    """Return the value of a field that is true or false, 1 or 0, also as text.

    Raises BadRow if it is another.
    """
    known = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    found = known.get(str(row.get(field)).lower())
    if found is None:
        raise BadRow(
            f"field '{field}' is no label",
            f"found {str(row.get(field))[:40]!r}; allowed: true, false, 1, 0",
        )
    return found


def user_turn(text: str) -> Messages:
    """Return a text as a prompt of one turn."""
    return (Message("user", text),)
