"""adapter_config.json: what PEFT may read from it, and by model.lora."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.core.validation import build
from lightning_rlhf.models.checkpoint import ADAPTER, check_adapter
from lightning_rlhf.models.config import LoRASettings

from .conftest import Lineage


@pytest.fixture
def folder(tmp_path: Path, adapters: Lineage) -> Path:
    """A copy of an adapter of stage=rm."""
    shutil.copytree(adapters.rm.path, tmp_path / "rm")
    return tmp_path / "rm"


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("peft_type", "PROMPT_TUNING", "LORA"),
        ("layer_replication", [[0, 10**9]], "null"),
        ("megatron_config", {"a": 1}, "null"),
        ("use_rslora", "false", "true or false"),
        ("lora_alpha", float("nan"), "a finite number"),
        ("lora_alpha", float("inf"), "a finite number"),
        ("r", 10**6, "1 to 4096"),
    ],
)
def test_a_value_is_refused(folder: Path, key: str, value: Any, allowed: str) -> None:
    file = folder / ADAPTER
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(CheckpointError) as error:
        check_adapter(folder)
    caught = str(error.value)
    assert caught.startswith(f"{folder} cannot be loaded: {ADAPTER}: {key} is ")
    assert caught.endswith(f"; allowed: {allowed}")


def test_settings_of_the_user() -> None:
    for values, told in (
        ({"target_modules": "["}, r"target_modules is '\[', which is no regular expression"),
        ({"r": 4097}, r"model\.lora\.r is 4097; allowed: .*<= 4096"),
    ):
        with pytest.raises(ConfigError, match=told):
            build(LoRASettings, {"r": 4, "alpha": 8, "target_modules": "all-linear"} | values,
                  "model.lora")  # fmt: skip
