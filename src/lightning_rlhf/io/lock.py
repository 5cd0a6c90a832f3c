"""A lock that processes take by a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock `file` inside; the system frees it when this process ends.

    Only a killed process leaves the file behind, unlocked.
    Raises filelock.Timeout at once where another process holds it.
    """
    lock = FileLock(file, timeout=0)
    lock.acquire()
    try:
        yield
    finally:
        # Removed before the release, by the holder alone: another process finds it gone.
        file.unlink(missing_ok=True)
        lock.release()
