"""The checkpoint files of a run: `<step>.ckpt` (six digits) and `best.ckpt`.

Apart from the callback that writes them, since torch loads slowly and file names are read without
it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_rlhf.core.errors import CheckpointError, first_line
from lightning_rlhf.io.storage import UNFINISHED, written_whole

RUN = "lightning_rlhf"
"""Checkpoint key of the origin and the step."""
OUTLINE = "outline"
"""Checkpoint key of `outline` of all other keys."""
BEST = "best"
"""File name, without suffix, of the best checkpoint."""
SUFFIX = ".ckpt"
"""File name suffix of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run that wrote a checkpoint, which is the only run that can resume from it."""

    stage: str
    """Stage of the run."""
    model: str
    """Model preset of the run."""
    version: str
    """Version of lightning-rlhf."""
    run: str
    """Random identifier that the run received when it started."""


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return folder / f"{step:06d}{SUFFIX}"


def numbered(folder: Path) -> list[Path]:
    """Return the paths of all numbered checkpoints, oldest step first."""
    found = (f for f in folder.glob(f"*{SUFFIX}") if re.fullmatch("[0-9]{6,}", f.stem))
    return sorted(found, key=step_named)


def step_named(path: Path) -> int:
    """Return the step in the file name of a numbered checkpoint."""
    return int(path.stem)


def keep_newest(folder: Path, count: int, step: int | None = None) -> None:
    """Delete all numbered checkpoints but the newest `count`, and that of `step`."""
    for path in numbered(folder)[:-count]:
        if step_named(path) != step:
            path.unlink()


def link(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy where the file system has no links."""
    if target.exists() and target.samefile(source):
        return  # renaming one link of a file over another has no effect
    with written_whole(target, source.stat().st_size) as beside:
        beside.unlink()
        try:
            os.link(source, beside)
        except OSError:
            shutil.copyfile(source, beside)


def go_back(folder: Path, step: int) -> dict[str, str]:
    """Delete checkpoints later than `step`, from which the run resumes, and unfinished files.

    An unreadable `best.ckpt` is deleted too.

    Returns: file name -> reason, for the deleted files other than unfinished ones.
    """
    best = folder / f"{BEST}{SUFFIX}"
    later = f"later than step {step}"
    gone = {path: later for path in numbered(folder) if step_named(path) > step}
    if best.exists():
        try:
            best_step = step_of(best)
        except CheckpointError:
            gone[best] = "unreadable"
        else:
            if best_step == step and not path_of(folder, step).exists():
                link(best, path_of(folder, step))
            if best_step > step:
                gone[best] = later
    for path in (*gone, *folder.glob(f"*{UNFINISHED}")):
        path.unlink()
    return {path.name: why for path, why in gone.items()}


def step_of(path: Path) -> int:
    """Return the step at which a checkpoint was written. Raises CheckpointError like `read_run`."""
    return int(read_run(path)["step"])


def stamp(origin: Origin, step: int) -> dict[str, Any]:
    """Return the value of the key RUN of a checkpoint."""
    return {**asdict(origin), "step": step}


def load_checkpoint(path: Path) -> Any:
    """Return the contents of a checkpoint; tensors are memory-mapped, and read on first use.

    Raises CheckpointError where the file cannot be read.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # damaged bytes raise errors of any type
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def read_run(path: Path, content: Any = None) -> dict[str, Any]:
    """Return the value of the key RUN of the checkpoint, without reading tensors.

    content: contents of the file, where they are loaded already.

    Raises CheckpointError where the file cannot be read, or was written by another program.
    """
    found = load_checkpoint(path) if content is None else content
    run: Any = found.get(RUN) if isinstance(found, dict) and "state_dict" in found else None
    keys = {*Origin.__dataclass_fields__, "step"}
    if not isinstance(run, dict) or run.keys() != keys or not isinstance(run["step"], int):
        raise CheckpointError(f"{path} is foreign: no checkpoint of this lightning-rlhf")
    return run


def check_checkpoint(path: Path, origin: Origin) -> dict[str, Any]:
    """Return the contents of the checkpoint; tensors are memory-mapped, and read on first use.

    Raises CheckpointError unless the file is complete, unmodified and from `origin`.
    """
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except Exception as error:  # damaged bytes raise errors of any type
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} cannot be read: {damaged} in it is damaged")
    content: dict[str, Any] = load_checkpoint(path)
    found = read_run(path, content)
    for key, value in asdict(origin).items():
        if found[key] != value:
            what = "lightning-rlhf" if key == "version" else key
            raise CheckpointError(f"{path} is foreign: of {what} {found[key]}, not {value}")
    if path.stem.isdigit() and found["step"] != step_named(path):
        raise CheckpointError(f"{path} is foreign: of step {found['step']}, whatever its name")
    if OUTLINE not in content or content[OUTLINE] != outline(content):
        raise CheckpointError(f"{path} is foreign: it does not hold what this program wrote")
    return content


def outline(checkpoint: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a checkpoint's keys, plain values, and tensor shapes and types.

    It changes when a file is edited and saved again. Damaged tensor data is detected by the
    checksums that torch.save writes.
    """
    import torch

    def described(tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return tuple(tree.shape), tree.dtype
        if isinstance(tree, dict):
            return [(key, described(value)) for key, value in tree.items()]
        if isinstance(tree, list | tuple):
            return [described(value) for value in tree]
        return tree

    rest = {key: value for key, value in checkpoint.items() if key != OUTLINE}
    return hashlib.sha256(repr(described(rest)).encode()).hexdigest()
