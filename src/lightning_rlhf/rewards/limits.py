"""Bounds of what the clients of a reward server may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of what clients may use, of which there is one set."""

    head_bytes: int = 16 * 2**10
    """Size of the request line and the headers."""
    body_bytes: int = 8 * 2**20
    """Size of a body."""
    held_bytes: int = 64 * 2**20
    """Size of all bodies that are held at once, as they were received; one is parsed at a time."""
    connections: int = 256
    """Number of connections at once."""
    head_s: float = 10.0
    """Time from the opening of a connection, or from an answer, to the end of the next headers."""
    body_s: float = 60.0
    """Time from the end of the headers to the end of the body."""
    stop_s: int = 20
    """Time from a signal to the end, in which requests that have come in are answered."""
