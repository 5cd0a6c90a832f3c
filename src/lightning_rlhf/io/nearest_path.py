"""The existing path that is nearest to one that does not exist, for error messages."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

MOST_NAMES = 6
"""Largest number of names of a folder that a message lists."""


def nearest_path(source: str) -> str:
    """Return what exists in place of a missing path, as the continuation of a message.

    The first part of the path that does not exist is compared with the names beside it. Returns
    "; the nearest is PATH" where one is alike, else "; FOLDER holds NAMES"; an empty text where
    nothing of the path exists, or nothing is beside it.
    """
    path = Path(os.path.expanduser(source))
    parts = path.parts
    there = next((n for n in range(len(parts)) if not os.path.exists(Path(*parts[: n + 1]))), None)
    if there is None:
        return ""
    above, missing = Path(*parts[:there]), parts[there]
    names = _names(above, path.suffix)
    if close := difflib.get_close_matches(missing, names, n=1):
        found = above / close[0]
        whole = found.joinpath(*parts[there + 1 :])
        return f"; the nearest is {whole if whole.exists() else found}"
    if not names or above in (Path(), Path("/")):
        return ""
    more = ", ..." * (len(names) > MOST_NAMES)
    return f"; {above} holds {', '.join(names[:MOST_NAMES])}{more}"


def _names(folder: Path, suffix: str) -> list[str]:
    """Return the names of the folders in a folder, and of its files that end in `suffix`."""
    try:
        found = sorted(folder.iterdir())
    except OSError:  # no right to list it
        return []
    return [path.name for path in found if path.is_dir() or path.suffix == suffix != ""]
