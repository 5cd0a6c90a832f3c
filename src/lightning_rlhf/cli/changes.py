"""Whether two configurations are of the same run, and if not, in which key they differ."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

SAVING = tuple(
    f"{stage}.{key}"
    for stage in ("sft", "rm", "ppo")
    for key in ("checkpoint_every", "checkpoint_minutes", "checkpoints_kept")
)
VOLATILE = (
    "resume", "overwrite", "record", "debug", "logger", "recipe", "run", "job", "outputs", *SAVING,
)  # fmt: skip
"""Keys that may differ between two calls of a run: its folder's names, and what is not computed."""
UNREAD: Mapping[str, tuple[str, ...]] = {
    "sft": ("data.preferences", "data.prompts", "data.judge", "reward"),
    "rm": ("data.demonstrations", "data.prompts", "data.judge", "reward"),
    "ppo": ("data.demonstrations", "data.preferences"),
    "eval": ("data.demonstrations", "data.prompts", "data.judge"),
}
"""Stage -> keys that it does not read."""


def differing_key(
    one: dict[str, Any], other: dict[str, Any], ignored: Collection[str]
) -> str | None:
    """The first key in which two configurations differ, or None; `ignored` ones and theirs may."""
    ours, theirs = flatten(one), flatten(other)
    for key in sorted(ours.keys() | theirs.keys()):
        if any(f"{key}.".startswith(f"{prefix}.") for prefix in ignored):
            continue
        if key not in ours or key not in theirs or ours[key] != theirs[key]:
            return key
    return None


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, as JSON would hold the values."""
    if not isinstance(tree, dict):
        return {prefix: json.loads(json.dumps(tree))}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
