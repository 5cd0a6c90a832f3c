"""Shares as percentages."""

from __future__ import annotations


def percent(share: float, decimals: int = 1) -> str:
    """Return the fraction `share` as a percentage; zero has no sign: -1e-9 -> 0.0%."""
    return f"{share:z.{decimals}%}"
