"""The checkpoints of a run on the disk: `<step>.ckpt` with six digits, and `best.ckpt`."""

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
from lightning_rlhf.core.storage import UNFINISHED, written_whole

RUN = "lightning_rlhf"
"""Key of a checkpoint under which its origin and its step are."""
OUTLINE = "outline"
"""Key of a checkpoint under which `outline` of the rest of it is."""
BEST = "best"
SUFFIX = ".ckpt"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a checkpoint is of; it continues no other run."""

    stage: str
    model: str
    version: str
    """Of lightning-rlhf."""
    run: str
    """A random name that the run got when it began."""


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is."""
    return folder / f"{step:06d}{SUFFIX}"


def numbered(folder: Path) -> list[Path]:
    """The checkpoints of steps, the oldest first."""
    found = (f for f in folder.glob(f"*{SUFFIX}") if re.fullmatch("[0-9]{6,}", f.stem))
    return sorted(found, key=step_named)


def step_named(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.stem)


def keep_newest(folder: Path, count: int) -> None:
    """Delete the checkpoints before the newest `count`."""
    for path in numbered(folder)[:-count]:
        path.unlink()


def link_best(folder: Path, step: int) -> None:
    """Let `best.ckpt` be the checkpoint of `step`."""
    source, best = path_of(folder, step), folder / f"{BEST}{SUFFIX}"
    if best.exists() and best.samefile(source):
        return  # to which a rename would do nothing
    link(source, best)


def link(source: Path, target: Path) -> None:
    """Let `target` be the same file, or a copy of it where the file system has no links."""
    with written_whole(target, source.stat().st_size) as beside:
        try:
            os.link(source, beside)
        except OSError:
            shutil.copyfile(source, beside)


def go_back(folder: Path, step: int) -> dict[str, str]:
    """Delete what is later than `step`, which the run goes on from, and what was half written.

    A best one that cannot be read goes too. Returns: of the files that went, but for those half
    written, the name -> why.
    """
    best = folder / f"{BEST}{SUFFIX}"
    later = f"later than step {step}"
    gone = {path: later for path in numbered(folder) if step_named(path) > step}
    if best.exists():
        best_step = step_of(best) if is_readable(best) else None
        if best_step == step and not path_of(folder, step).exists():
            link(best, path_of(folder, step))
        if best_step is None or best_step > step:
            gone[best] = "unreadable" if best_step is None else later
    for path in (*gone, *folder.glob(f"*{SUFFIX}{UNFINISHED}")):
        path.unlink()
    return {path.name: why for path, why in gone.items()}


def is_readable(path: Path) -> bool:
    """Whether it is a checkpoint of a run."""
    try:
        read_run(path)
    except CheckpointError:
        return False
    return True


def step_of(path: Path) -> int:
    """The step that a checkpoint was written at. Raises CheckpointError as `read_run` does."""
    return int(read_run(path)["step"])


def stamp(origin: Origin, step: int, val_every: int) -> dict[str, Any]:
    """Return what stands in a checkpoint under RUN; val_every: steps between validations."""
    return {**asdict(origin), "step": step, "val_every": val_every}


def read_run(path: Path) -> dict[str, Any]:
    """What stands in the checkpoint under RUN; no tensor is read.

    Raises CheckpointError where the file cannot be read, or is of another program.
    """
    return run_of(path, load(path))


def load(path: Path) -> Any:
    """Return what a checkpoint holds; its tensors are read where they are used.

    Raises CheckpointError where the file cannot be read.
    """
    import torch  # which takes seconds: the names alone are read without it

    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # what damaged bytes raise is anybody's guess
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def run_of(path: Path, found: Any) -> dict[str, Any]:
    """Return what `found`, the content of `path`, holds under RUN.

    Raises CheckpointError where it is of another program.
    """
    run: Any = found.get(RUN) if isinstance(found, dict) and "state_dict" in found else None
    keys = {*Origin.__dataclass_fields__, "step", "val_every"}
    if not isinstance(run, dict) or run.keys() != keys or not isinstance(run["step"], int):
        raise CheckpointError(f"{path} is foreign: no checkpoint of this lightning-rlhf")
    return run


def check_checkpoint(path: Path, origin: Origin) -> dict[str, Any]:
    """Return what the checkpoint holds; its tensors are read where they are used.

    Raises CheckpointError unless it is whole, of `origin`, and as it was written.
    """
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except Exception as error:  # as above
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} cannot be read: {damaged} in it is damaged")
    content = load(path)
    found = run_of(path, content)
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
    """Return the SHA-256 of all that a checkpoint holds but the numbers in its tensors.

    Keys, plain values, shapes and types: a file that was edited and saved again has another one.
    What damages the numbers does not fit the checksums that torch.save writes.
    """
    rest = {key: value for key, value in checkpoint.items() if key != OUTLINE}
    return hashlib.sha256(repr(described(rest)).encode()).hexdigest()


def described(tree: Any) -> Any:
    """Return nested dictionaries and lists with the shape and type of each tensor in its place."""
    import torch

    if isinstance(tree, torch.Tensor):
        return tuple(tree.shape), tree.dtype
    if isinstance(tree, dict):
        return [(key, described(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return [described(value) for value in tree]
    return tree
