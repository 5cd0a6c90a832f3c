"""Quotation of values in errors; long texts lose their middle."""

from __future__ import annotations

import reprlib
from typing import Any

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 300


def quoted(value: Any) -> str:
    """Return the `repr` of a value, with at most about 300 characters of each text."""
    try:
        return _REPR.repr(value)
    except Exception:  # an integer of more than 4300 digits, or a foreign object's own error
        return f"a {type(value).__name__} that cannot be shown"
