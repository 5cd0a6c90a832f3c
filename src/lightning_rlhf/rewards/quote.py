"""Texts in errors, long ones without their middle."""

from __future__ import annotations

import reprlib
from typing import Any

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 300


def quoted(value: Any) -> str:
    """`repr` of at most some 300 characters a text."""
    try:
        return _REPR.repr(value)
    except (
        Exception
    ):  # a whole number of more than 4300 digits has none, and foreign objects may fail
        return f"a {type(value).__name__} that cannot be shown"
