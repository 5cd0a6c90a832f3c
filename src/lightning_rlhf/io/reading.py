"""Readers of text and JSON lines in a run folder, whose errors name file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.validation import LARGEST


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file with its line ends unchanged.

    Raises CheckpointError where it cannot be read or is not UTF-8.
    """
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: byte {error.start + 1} is no UTF-8") from error


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line of a JSONL file and the object in it.

    A last line without a line end is ignored: the process that wrote it was interrupted.
    Raises CheckpointError, with the line number, where a complete line is no JSON object.
    """
    for number, line in enumerate(read_text(path).split("\n")[:-1], start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise damaged_line(path, number, str(error)) from error
        if not isinstance(found, dict):
            raise damaged_line(path, number, f"it holds no object, but a {type(found).__name__}")
        yield line, found


def is_number(found: object) -> TypeGuard[int | float]:
    """Return whether a value of JSON is a number exact as a float, or NaN or infinite."""
    if isinstance(found, int) and not isinstance(found, bool):
        return abs(found) <= LARGEST
    return isinstance(found, float)


def damaged_line(path: Path, number: int, reason: str) -> CheckpointError:
    """Return the error about line `number`, counted from 1."""
    return CheckpointError(
        f"{path}, line {number}, is damaged: {reason}. Delete that line, or mend it"
    )
