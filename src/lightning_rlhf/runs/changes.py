"""Differences between two configurations of a run, and how a run ended (ending.json)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from lightning_rlhf.callbacks.checkpoint_files import Origin
from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.core.validation import STRICT, PositiveInt, build
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.models.checkpoint import json_object
from lightning_rlhf.runs.stage import Stage

SAVING = ("checkpoint_every", "checkpoint_minutes", "checkpoints_kept")
"""Keys of a stage's section that set when checkpoints are written."""
VOLATILE = (
    "final",  # the section of the stage has its value
    "resume", "overwrite", "preflight", "record", "debug", "samples", "logger", "recipe", "run",
    "job", "outputs", "callbacks", "trainer._target_", "trainer.enable_model_summary",
    "trainer.devices", "trainer.enable_progress_bar", "trainer.max_time", "trainer.num_nodes",
    "trainer.profiler",
)  # fmt: skip
"""Keys that may differ between two calls of a run: names of its folder, and keys that do not change
its results."""
DECIDES = r"reward\.(components\.[^.]+\.)?unfit"
"""Pattern of keys that decide whether a run starts and do not change its results."""
LONGEST = 60
"""Largest number of characters of a value in a message."""
LISTED = 6
"""Largest number of keys that an error names; the rest are counted."""


def volatile(stage: Stage) -> tuple[str, ...]:
    """Return the keys that may differ between two calls of a run of the stage."""
    return (*VOLATILE, *(f"{stage.name}.{key}" for key in (*SAVING, *stage.volatile)))


def changes(stage: Stage, tree: dict[str, Any], file: Path) -> list[str]:
    """Return each key in which `tree` differs from the one in `file`, with old and new value."""
    ignored = (*volatile(stage), *stage.unread)
    then = read_config(file, "overwrite=true starts over")
    before, now = flatten(then), flatten(tree)
    return [
        "{} was {}, is {}".format(key, *abridged(value_in(before, key), value_in(now, key)))
        for key in differing_keys(then, tree, ignored)
    ]


def read_config(file: Path, way: str) -> dict[str, Any]:
    """Return the object in a JSON file of a run folder.

    way: advice for a damaged file, appended to the reason.
    Raises CheckpointError where it is missing, damaged or nested deeper than a configuration.
    """
    try:
        tree = json_object(file)
        flatten(tree)
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{file} ")
        raise CheckpointError(f"{file} is damaged: it {reason}; {way}") from error
    except RecursionError as error:
        raise CheckpointError(f"{file} is damaged: it is nested too deep; {way}") from error
    return tree


def value_in(flat: Mapping[str, Any], key: str) -> str:
    """Return the value of a key as JSON, or "not there" where it is missing."""
    return json.dumps(flat[key]) if key in flat else "not there"


def abridged(*texts: str) -> list[str]:
    """Return the texts; long ones are cut to the part around their first difference."""
    same = takewhile(lambda signs: len(set(signs)) == 1, zip(*texts, strict=False))
    start = max(0, len(list(same)) - LONGEST // 3)
    found = []
    for text in texts:
        if len(text) > LONGEST:
            head, part, tail = text[:start], text[start : start + LONGEST], text[start + LONGEST :]
            text = f"{'...' if head else ''}{part}{'...' if tail else ''}"
        found.append(text)
    return found


def listed(changed: Sequence[str]) -> str:
    """Return all changes as text, or the first LISTED and the number of the others."""
    more = len(changed) - LISTED
    return "; ".join([*changed[:LISTED], *([f"and {more} more"] if more > 0 else [])])


def differing_keys(
    one: Mapping[str, Any], other: Mapping[str, Any], ignored: Collection[str]
) -> list[str]:
    """Return the keys in which two configurations differ, except `ignored` keys and nested ones."""
    ours, theirs = flatten(one), flatten(other)
    return [
        key
        for key in sorted(ours.keys() | theirs.keys())
        if not any(f"{key}.".startswith(f"{prefix}.") for prefix in ignored)
        and not re.fullmatch(DECIDES, key)
        and (key not in ours or key not in theirs or ours[key] != theirs[key])
    ]


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return {"a.b": 1} for {"a": {"b": 1}}, with the values as JSON would hold them."""
    if not isinstance(tree, dict):
        return {prefix: json.loads(json.dumps(tree))}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


ENDING = "ending.json"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Value:
    """A metric at the chosen step and at the last one."""

    mode: Mode
    """Direction in which the metric is better: min or max."""
    chosen: float | None
    """Value at the chosen step; None where it was not measured."""
    last: float | None
    """Value at the last step; None where it was not measured."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ending:
    """The end of a run."""

    final: str
    """Rule that chose the step: last, best or its number."""
    step: PositiveInt
    """Step whose model was chosen."""
    last_step: PositiveInt
    """Last step of the run."""
    metrics: dict[str, Value]
    """Metrics that tell which evaluation is the best, by name."""
    stopped: str | None
    """Why the run ended before the last step of its schedule; None where it did not."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """A folder like `final/` that is made from a checkpoint of a run."""

    folder: Path
    """Path of the folder."""
    checkpoint: Path
    """Checkpoint with the weights."""
    origin: Origin
    """Run that wrote the checkpoint."""
    metrics: dict[str, float]
    """Metrics of the evaluation at that step; {} where there was none."""
    ending: Ending
    """Step of the checkpoint, and the metrics there and at the last step."""


def write_ending(folder: Path, ending: Ending) -> None:
    """Write the ending of the run in `folder`."""
    with written_whole(folder / ENDING) as beside:
        beside.write_text(json.dumps(asdict(ending), indent=2) + "\n")


def read_ending(folder: Path) -> Ending | None:
    """Return the ending of the run in `folder`; None of one that was cut off.

    Raises CheckpointError where the file is damaged.
    """
    file = folder / ENDING
    if not file.is_file():
        return None
    tree = json_object(file)
    try:
        metrics = tree["metrics"] if isinstance(tree.get("metrics"), dict) else {}
        values = {name: build(Value, node, f"metrics.{name}") for name, node in metrics.items()}
        return build(Ending, {**tree, "metrics": values}, "ending")
    except ConfigError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
