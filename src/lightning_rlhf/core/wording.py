"""Words of messages."""

from __future__ import annotations

import reprlib
from typing import Any

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 300


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: "1 pair", "2 pairs"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def quoted(value: Any) -> str:
    """Return the `repr` of a value, with at most about 300 characters of each text."""
    try:
        return _REPR.repr(value)
    except Exception:  # an integer of more than 4300 digits, or a foreign object's own error
        return f"a {type(value).__name__} that cannot be shown"


def percent(share: float, decimals: int = 1) -> str:
    """Return the fraction `share` as a percentage; zero has no sign: -1e-9 -> 0.0%."""
    return f"{share:z.{decimals}%}"
