"""Differences between two configurations of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from lightning_rlhf.core.config import StageConfig
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.models.weights import json_object
from lightning_rlhf.stages.stage import Stage

SAVING = ("checkpoint_every", "checkpoint_minutes", "checkpoints_kept")
"""Keys of a stage's section that set when checkpoints are written."""
VOLATILE = (
    "final",  # the section of the stage has its value
    "resume", "overwrite", "preflight", "record", "debug", "logger", "recipe", "run", "job",
    "outputs", "callbacks", "trainer._target_", "trainer.enable_model_summary",
    "trainer.devices", "trainer.enable_progress_bar", "trainer.max_time", "trainer.num_nodes",
    "trainer.profiler",
)  # fmt: skip
"""Keys that may differ between two calls of a run: names of its folder, and keys that do not change
its results."""
DECIDES = r"reward\.(components\.[^.]+\.)?unfit"
"""Pattern of keys that decide whether a run starts and do not change its results."""
ADDED_TO_SECTION: Mapping[str, dict[str, Any]] = {
    "model": {"kernels": "auto"},
    "data": {"format": "auto", "columns": {}, "train_on": "last"},
    "trainer": {"num_nodes": 1, "matmul_precision": "highest"},
}
"""Section -> keys of it that configurations of earlier versions lack, with the values that they ran
with."""
ADDED_TO_STAGE: dict[str, Any] = {
    "final": "last",
    "ema_decay": None,
    "best": {"metric": None, "mode": None},
    "stop": {"patience": None, "metric": None, "mode": None, "min_gain": 0.0},
}
"""Keys of a stage that trains which configurations of earlier versions lack, likewise."""
ADDED_TO_PPO: dict[str, Any] = {
    "generation_batch_size": None,
    "stop": {**ADDED_TO_STAGE["stop"], "max_kl": None},
    "ptx_coef": 0.0,
    "ptx_batch_size": 32,
}
"""The same of stage=ppo, and of stages with its keys."""
ADDED = {"preflight": "off"}
"""Other keys that configurations of earlier versions lack -> the values that they ran with."""
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
    then = stage_completed(completed(read_config(file, "overwrite=true starts over")), stage)
    tree = stage_completed(completed(tree), stage)
    before, now = flatten(then), flatten(tree)
    return [
        "{} was {}, is {}".format(key, *abridged(value_in(before, key), value_in(now, key)))
        for key in differing_keys(then, tree, ignored)
    ]


def completed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with the keys that earlier versions lack."""
    tree = {**ADDED, **tree}
    sections = {name: tree.get(name) for name in ADDED_TO_SECTION}
    return tree | {
        name: ADDED_TO_SECTION[name] | section
        for name, section in sections.items()
        if isinstance(section, dict)
    }


def stage_completed(tree: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """Return a configuration with the keys that a section of `stage` lacks in earlier versions."""
    section = tree.get(stage.name)
    if not isinstance(section, dict) or not issubclass(stage.config, StageConfig):
        return dict(tree)
    added = ADDED_TO_STAGE | (ADDED_TO_PPO if issubclass(stage.config, PPOConfig) else {})
    return {**tree, stage.name: added | section}


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
    one: dict[str, Any], other: dict[str, Any], ignored: Collection[str]
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
