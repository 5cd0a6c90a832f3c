"""From a section of the configuration to a frozen dataclass: no key too few, none too many."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from lightning_rlhf.core.config import require
from lightning_rlhf.core.errors import ConfigError

T = TypeVar("T")


def section(tree: Mapping[str, Any], name: str, *keys: str) -> Mapping[str, Any]:
    """The mapping `tree[name]`, which must hold `keys`."""
    require(name in tree, name, "missing", "a mapping of keys to values")
    found = tree[name]
    require(isinstance(found, Mapping), name, found, "a mapping of keys to values")
    for key in keys:
        require(key in found, f"{name}.{key}", "missing", "a value")
    return typing.cast(Mapping[str, Any], found)


def build(cls: type[T], node: Any, prefix: str) -> T:
    """`cls(**node)` with ConfigError for unknown and missing keys."""
    require(isinstance(node, Mapping), prefix, node, "a mapping of keys to values")
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    refuse_unknown(node, names, f"{prefix}.")
    required = {
        f.name
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING
    }
    missing = sorted(required - set(node))
    if missing:
        raise ConfigError(f"{prefix}.{missing[0]} is missing from the configuration")
    return cls(**node)


def refuse_unknown(node: Mapping[str, Any], known: set[str], prefix: str) -> None:
    """Raise ConfigError for a key that nothing reads."""
    for key in node:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = (
                f"did you mean {prefix}{close[0]}?"
                if close
                else f"allowed: {', '.join(sorted(known))}"
            )
            raise ConfigError(f"{prefix}{key} is not a known key; {hint}")


def frozen_lists(node: Any) -> Any:
    """A mapping with tuples for its lists."""
    if not isinstance(node, Mapping):
        return node
    return {key: tuple(v) if isinstance(v, list) else v for key, v in node.items()}
