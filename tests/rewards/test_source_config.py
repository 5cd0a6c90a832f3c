"""The settings of a source, and the presets that hold their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.validation import build
from lightning_rlhf.rewards.config import (
    ComponentConfig,
    FunctionConfig,
    HTTPConfig,
)

CONF = Path(__file__).parents[2] / "conf" / "reward"
GIVEN: dict[str, tuple[type[ComponentConfig], dict[str, Any]]] = {
    "function": (FunctionConfig, {"path": "rules.py:score"}),
    "http": (HTTPConfig, {"url": "http://host:8000/score"}),
}


def make(kind: str, key: str = "reward", /, **changes: Any) -> ComponentConfig:
    """What the preset says, with what must be given."""
    preset = yaml.safe_load((CONF / f"{kind}.yaml").read_text())
    preset.pop("defaults", None)
    cls, given = GIVEN[kind]
    config = build(cls, {**preset, **given, **changes}, key)
    config.check(key)
    return config


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("function", {"arguments": {1: 2}}, "arguments is {1: 2}; allowed: a mapping of names to"),
        ("function", {"normalization": "stored"}, "normalization is 'stored'; allowed: none, run"),
        ("http", {"url": "ftp://me:word@h"}, "url is 'ftp://***@h'; allowed: http://HOST"),
        ("http", {"token_env": " "}, "token_env is ' '; allowed: the name of an environment var"),
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_named_with_its_key(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    key = "reward.components.length"
    with pytest.raises(ConfigError) as found:
        make(kind, key, **changes)
    assert str(found.value).startswith(f"{key}.{message}")
