"""What may become of a file of a run folder: damages by name, each a function of the path."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Edit = Callable[[Path], Any]


def says(content: str | bytes) -> Edit:
    """The file holds something else."""
    raw = content.encode() if isinstance(content, str) else content
    return lambda file: file.write_bytes(raw)


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def folder(file: Path) -> None:
    """A folder that is not empty stands in its place."""
    remove(file)
    file.mkdir()
    (file / "inside").write_text("kept")


def dangling(file: Path) -> None:
    remove(file)
    file.symlink_to("nowhere")


def remove(file: Path) -> None:
    shutil.rmtree(file) if file.is_dir() else file.unlink()


BYTES: Mapping[str, Edit] = {
    "empty": says(""),
    "halved": halved,
    "random": says(bytes(range(256)) * 3),
    "no UTF-8": says(b"\xff\xfe\x80\n"),
    "NUL": says(b"\0" * 64 + b"\n"),
    "folder": folder,
    "dangling": dangling,
}
"""Damages of any file."""
JSON: Mapping[str, Edit] = {
    "null": says("null"),
    "list": says("[1, 2]"),
    "number": says("17"),
    "string": says('"text"'),
    "deep": says("[" * 100_000 + "]" * 100_000),
    "less deep": says('{"a":' * 600 + "1" + "}" * 600),
    "huge number": says('{"a": 1' + "0" * 5000 + "}"),
    "NaN": says("NaN"),
    "lone surrogate": says('{"\\ud800": "\\ud800"}'),
}
"""Damages of a JSON file."""


def sets(**values: Any) -> Edit:
    """The JSON object in the file has other values; one that is ... is not there."""

    def edit(file: Path) -> None:
        changed = json.loads(file.read_text()) | values
        file.write_text(json.dumps({k: v for k, v in changed.items() if v is not ...}))

    return edit


def adds(line: str | bytes) -> Edit:
    """One more line at the end."""
    raw = line.encode() if isinstance(line, str) else line
    return lambda file: file.write_bytes(file.read_bytes() + raw + b"\n")


def saved(*keys: str | int, to: Any) -> Edit:
    """What a checkpoint holds under the keys is `to`, or `to` of it; `...` takes it out."""

    def edit(file: Path) -> None:
        tree = torch.load(file, weights_only=True)
        place = tree
        for key in keys[:-1]:
            place = place[key]
        if to is ...:
            del place[keys[-1]]
        else:
            place[keys[-1]] = to(place[keys[-1]]) if callable(to) else to
        torch.save(tree, file)

    return edit
