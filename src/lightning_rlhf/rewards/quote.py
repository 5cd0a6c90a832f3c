"""Texts in errors, long ones without their middle."""

from __future__ import annotations

import reprlib
from typing import Any

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 300


def quoted(value: Any) -> str:
    """`repr` of at most some 300 characters a text."""
    return _REPR.repr(value)
