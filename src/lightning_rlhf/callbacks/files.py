"""The files that callbacks write into the folder of a run, and a resume reads: checkpoints
(`<step>.ckpt`, six digits, and `best.ckpt`), metrics.csv, samples, and the id of the W&B run.

Apart from the callbacks, since torch and Lightning load slowly and these are read without them.
"""

import csv
import hashlib
import os
import re
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_rlhf.core.errors import CheckpointError, first_line
from lightning_rlhf.io.console import json_line
from lightning_rlhf.io.storage import (
    UNFINISHED,
    damaged_line,
    json_lines,
    make_folder,
    read_text,
    written_whole,
)

RUN = "lightning_rlhf"
"""Checkpoint key of the origin and the step."""
OUTLINE = "outline"
"""Checkpoint key of `outline_of` all other keys."""
SUFFIX = ".ckpt"
"""File name suffix of a checkpoint."""
BEST = f"best{SUFFIX}"
"""File name of the best checkpoint."""
STEP = "step"
"""First column of metrics.csv."""
SAMPLES = "samples"
"""Name of the folder in that of a run."""
HELD_OUT = "held_out.jsonl"
"""Name of the file there of the responses that are sampled after supervised fine-tuning."""
WANDB_ID = "wandb_id.txt"
"""File of a run folder with the id of the run in W&B."""

Sample = dict[str, Any]


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
    best = folder / BEST
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
    """Return the step of a checkpoint. Raises CheckpointError like `read_stamp`."""
    return int(read_stamp(path)["step"])


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


def read_stamp(path: Path, content: Any = None) -> dict[str, Any]:
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
    found = read_stamp(path, content)
    for key, value in asdict(origin).items():
        if found[key] != value:
            what = "lightning-rlhf" if key == "version" else key
            raise CheckpointError(f"{path} is foreign: of {what} {found[key]}, not {value}")
    if path.stem.isdigit() and found["step"] != step_named(path):
        raise CheckpointError(f"{path} is foreign: of step {found['step']}, whatever its name")
    if OUTLINE not in content or content[OUTLINE] != outline_of(content):
        raise CheckpointError(f"{path} is foreign: it does not hold what this program wrote")
    return content


def outline_of(checkpoint: Mapping[str, Any]) -> str:
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


def read_rows(path: Path) -> dict[int, dict[str, str]]:
    """Return step -> its cells that are not empty; {} where there is no file.

    A last line without line end is ignored: a row that was cut off may show "1" for 12.
    Raises CheckpointError with the line number where a complete line is not a valid row.
    """
    if not os.path.lexists(path):
        return {}
    text = read_text(path)
    try:
        header, *lines = list(csv.reader(text[: text.rfind("\n") + 1].splitlines())) or [[STEP]]
    except csv.Error as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if header[0] != STEP or len({*header}) != len(header) or not all(header):
        raise CheckpointError(
            f"{path}, line 1, is damaged: found {','.join(header)[:60]!r}; allowed: {STEP}, and "
            "names that are all different"
        )
    rows: dict[int, dict[str, str]] = {}
    for number, cells in enumerate(lines, start=2):
        try:
            step = int(cells[0])
            row = {name: x for name, x in zip(header[1:], cells[1:], strict=True) if x}
            [float(x) for x in row.values()]
            if step <= max(rows, default=-1):
                raise ValueError
        except (ValueError, IndexError):
            raise CheckpointError(
                f"{path}, line {number}, is damaged: found {','.join(cells)[:60]!r}; allowed: a "
                f"step larger than those before it, and {len(header) - 1} numbers or empty cells. "
                "Delete that line, or mend it"
            ) from None
        rows[step] = row
    return rows


def train_samples(run_dir: Path) -> Path:
    """Return where the samples of training are."""
    return run_dir / SAMPLES / "train.jsonl"


def eval_samples(run_dir: Path, iteration: int) -> Path:
    """Return where the samples of the evaluation after an iteration are."""
    return run_dir / SAMPLES / f"eval_{iteration:06d}.jsonl"


def judged(run_dir: Path, iteration: int, part: str) -> dict[int, float]:
    """Return place of a prompt -> mean of a part of the judge's verdicts, after an iteration.

    Empty where there are no samples, as in a run whose user has deleted them.
    """
    path, found = eval_samples(run_dir, iteration), defaultdict[int, list[float]](list)
    for _, sample in json_lines(path) if path.is_file() else ():
        if (value := sample["judge"].get(part)) is not None:
            found[sample["index"]].append(value)
    return {index: fmean(values) for index, values in found.items()}


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write a file of samples whole, and make its folder."""
    make_folder(path.parent)
    lines = [json_line(sample) + "\n" for sample in samples]
    with written_whole(path) as beside:
        beside.write_text("".join(lines), encoding="utf-8")


def read_samples(path: Path) -> list[tuple[str, int]]:
    """Return the lines of a file of samples, each with the iteration that drew it.

    Raises CheckpointError, with the line, where the file is damaged.
    """
    found = []
    for place, (line, sample) in enumerate(json_lines(path), start=1):
        iteration = sample.get("iteration")
        if type(iteration) is not int or iteration < 0:
            raise damaged_line(path, place, "it does not say its iteration")
        found.append((line, iteration))
    return found


def read_wandb_id(path: Path) -> str:
    """Return the id of the W&B run. Raises CheckpointError where the file holds none."""
    found = read_text(path)
    if re.fullmatch(r"[\w-]{1,64}", found) is None:
        raise CheckpointError(
            f"{path} is damaged: found {found[:40]!r}; allowed: the id of a W&B run. Delete it to "
            "go on as a new run of W&B"
        )
    return found
