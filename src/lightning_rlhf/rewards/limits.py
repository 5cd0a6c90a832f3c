"""Limits on what the clients of a reward server may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on what clients may use; one set of values serves every reward server."""

    head_bytes: int = 16 * 2**10
    """Maximum size of the request line and the headers, bytes."""
    body_bytes: int = 8 * 2**20
    """Maximum size of a body, bytes."""
    held_bytes: int = 64 * 2**20
    """Maximum size of all bodies held at once, as received, bytes; one at a time is parsed."""
    connections: int = 256
    """Maximum number of open connections."""
    head_s: float = 10.0
    """Longest time from opening a connection, or from an answer, to the end of the next headers,
    seconds."""
    body_s: float = 60.0
    """Longest time from the end of the headers to the end of the body, seconds."""
    stop_s: int = 20
    """Longest time from a signal to the end, in which received requests are answered, seconds."""
