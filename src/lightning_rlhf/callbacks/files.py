"""Parts of callbacks that are read without torch and Lightning, which load slowly: the section
`logger`, and the files that they write into the folder of a run and a resume reads: checkpoints
(`<step>.ckpt`, six digits, and `best.ckpt`), metrics.csv, samples, and the id of the W&B run.
"""

import csv
import hashlib
import netrc
import os
import re
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic.dataclasses import dataclass as validated

from lightning_rlhf.core.errors import CheckpointError, ConfigError, first_line
from lightning_rlhf.core.validation import STRICT, PositiveFloat, Text, Texts, build, check_value
from lightning_rlhf.io import console, storage

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
SAMPLES, TRAIN_SAMPLES = "samples", "samples/train.jsonl"
"""Folder of samples in that of a run, and the file there of those of training."""
HELD_OUT = "held_out.jsonl"
"""Name of the file there of the responses that are sampled after supervised fine-tuning."""
WANDB_ID = "wandb_id.txt"
"""File of a run folder with the id of the run in W&B."""

Sample = dict[str, Any]
Kind = Literal["csv", "tensorboard", "wandb"]
WandbMode = Literal["auto", "online", "offline", "disabled"]


@validated(frozen=True, kw_only=True, config=STRICT)
class LoggerConfig:
    """The logger beside metrics.csv, if any."""

    kind: Kind


@validated(frozen=True, kw_only=True, config=STRICT)
class WandbConfig(LoggerConfig):
    """Weights & Biases."""

    project: Text
    entity: Text | None
    """User or team; None is the account's own default."""
    group: Text | None
    """Group of runs; None is the name of the run for the jobs of a sweep, else no group."""
    tags: Texts
    """Tags beside the stage and the model."""
    mode: WandbMode
    """auto is online if a key is found, else offline; the variable WANDB_MODE overrides it."""

    init_timeout_s: PositiveFloat
    """Seconds without an answer after which the run is offline."""
    finish_timeout_s: PositiveFloat
    """Seconds of uploading at the end, after which the rest stays in the run's folder."""

    def __post_init__(self) -> None:
        has_key = wandb_key_present() or os.getenv("WANDB_IDENTITY_TOKEN_FILE")
        if self.start_mode == "online" and not has_key:
            raise ConfigError(
                "W&B is to be online (logger.mode, or the variable WANDB_MODE), but WANDB_API_KEY "
                "and netrc hold no key; run `wandb login`, or give logger.mode=offline"
            )

    @property
    def start_mode(self) -> Any:
        """Return the mode W&B starts in: WANDB_MODE, else `mode`, else by whether it has a key."""
        auto = "online" if wandb_key_present() else "offline"
        return os.getenv("WANDB_MODE") or (auto if self.mode == "auto" else self.mode)


def logger_config(options: Mapping[str, Any]) -> LoggerConfig:
    """Return the section `logger` of a configuration, checked."""
    kind = options["kind"]
    check_value("logger.kind", kind, Kind)
    return build(WandbConfig if kind == "wandb" else LoggerConfig, options, "logger")


def wandb_key_present() -> bool:
    """Return whether the environment or netrc holds a key for W&B."""
    if os.getenv("WANDB_API_KEY"):
        return True
    host = urlsplit(os.getenv("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    path = Path(os.getenv("NETRC", "~/.netrc")).expanduser()
    return path.exists() and netrc.netrc(path).authenticators(host) is not None


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
    return sorted(found, key=lambda path: int(path.stem))


def link(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy where the file system has no links."""
    if target.exists() and target.samefile(source):
        return  # renaming one link of a file over another has no effect
    with storage.written_whole(target, source.stat().st_size) as temporary:
        temporary.unlink()
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


def go_back(folder: Path, step: int) -> list[str]:
    """Delete checkpoints later than `step`, from which the run resumes, and unfinished files.

    An unreadable `best.ckpt` is deleted too. Returns: names of the deleted checkpoints, with why.
    """
    best, later = folder / BEST, f"later than step {step}"
    gone = {path: later for path in numbered(folder) if int(path.stem) > step}
    try:
        best_step = step_of(best) if best.exists() else None
    except CheckpointError:
        best_step = None
        gone[best] = "unreadable"
    if best_step is not None and best_step > step:
        gone[best] = later
    elif best_step == step and not path_of(folder, step).exists():
        link(best, path_of(folder, step))
    for path in (*gone, *folder.glob(f"*{storage.UNFINISHED}")):
        path.unlink()
    return [f"{path.name} ({why})" for path, why in gone.items()]


def step_of(path: Path) -> int:
    """Return the step of a checkpoint. Raises CheckpointError like `read_stamp`."""
    return int(read_stamp(path)["step"])


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
            if damaged := file.testzip():
                raise zipfile.BadZipFile(f"{damaged} in it is damaged")
    except Exception as error:  # damaged bytes raise errors of any type
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    content: dict[str, Any] = load_checkpoint(path)
    found = read_stamp(path, content)
    expected = asdict(origin)
    if path.stem.isdigit():
        expected["step"] = int(path.stem)
    for key, value in expected.items():
        if found[key] != value:
            what = "lightning-rlhf" if key == "version" else key
            raise CheckpointError(f"{path} is foreign: of {what} {found[key]}, not {value}")
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
        if isinstance(tree, dict):
            return [(key, described(value)) for key, value in tree.items() if key != OUTLINE]
        if isinstance(tree, list | tuple):
            return [described(value) for value in tree]
        return (tuple(tree.shape), tree.dtype) if isinstance(tree, torch.Tensor) else tree

    return hashlib.sha256(repr(described(checkpoint)).encode()).hexdigest()


def read_rows(path: Path) -> dict[int, dict[str, float]]:
    """Return step -> its cells that are not empty; {} where there is no file.

    A last line without line end is ignored: a row that was cut off may show "1" for 12.
    Raises CheckpointError with the line number where a complete line is not a valid row.
    """
    if not os.path.lexists(path):
        return {}
    lines = storage.read_text(path).splitlines(keepends=True)
    names: list[str] = []
    rows: dict[int, dict[str, float]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n") or not line.strip():
            continue
        try:
            step, *cells = next(csv.reader([line]))
            if number == 1:
                names, is_valid = cells, step == STEP and len({step, *cells}) == 1 + len(cells)
            else:
                is_valid = int(step) > next(reversed(rows), -1)
                pairs = zip(names, cells, strict=True)
                rows[int(step)] = {name: float(cell) for name, cell in pairs if cell}
        except (csv.Error, ValueError):
            is_valid = False
        if not is_valid:
            allowed = f"{STEP} and names in line 1, then a step larger than those before it, and "
            allowed += "as many numbers or empty cells as there are names"
            found = f"found {line.rstrip()[:60]!r}"
            raise storage.damaged_line(path, number, f"{found}; allowed: {allowed}")
    return rows


def eval_samples(run_dir: Path, iteration: int) -> Path:
    """Return where the samples of the evaluation after an iteration are."""
    return run_dir / SAMPLES / f"eval_{iteration:06d}.jsonl"


def judged(run_dir: Path, iteration: int, part: str) -> dict[int, float]:
    """Return place of a prompt -> mean of a part of the judge's verdicts, after an iteration.

    Empty where there are no samples, as in a run whose user has deleted them.
    """
    path, found = eval_samples(run_dir, iteration), defaultdict[int, list[float]](list)
    for _, sample in storage.json_lines(path) if path.is_file() else ():
        if (value := sample["judge"].get(part)) is not None:
            found[sample["index"]].append(value)
    return {index: fmean(values) for index, values in found.items()}


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write a file of samples whole, and make its folder."""
    storage.make_folder(path.parent)
    lines = [console.json_line(sample) + "\n" for sample in samples]
    with storage.written_whole(path) as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")


def read_wandb_id(path: Path) -> str:
    """Return the id of the W&B run. Raises CheckpointError where the file holds none."""
    found = storage.read_text(path)
    if re.fullmatch(r"[\w-]{1,64}", found) is None:
        raise CheckpointError(
            f"{path} is damaged: found {found[:40]!r}; allowed: the id of a W&B run. Delete it to "
            "go on as a new run of W&B"
        )
    return found
