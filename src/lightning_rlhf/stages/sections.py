"""Sections of a configuration tree."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from lightning_rlhf.core.errors import require


def section(tree: Mapping[str, Any], name: str, *keys: str) -> Mapping[str, Any]:
    """Return the mapping `tree[name]`. Raises ConfigError unless it is one that holds `keys`."""
    require(name in tree, name, "missing", "a mapping of keys to values")
    found = tree[name]
    require(isinstance(found, Mapping), name, found, "a mapping of keys to values")
    for key in keys:
        require(key in found, f"{name}.{key}", "missing", "a value")
    return typing.cast(Mapping[str, Any], found)
