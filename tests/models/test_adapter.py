"""adapter_config.json: what PEFT may read from it, and by model.lora."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.core.validation import build
from lightning_rlhf.models.adapter import ADAPTER, check_adapter
from lightning_rlhf.models.config import LoRASettings
from lightning_rlhf.models.roles import check_settings

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


def test_a_pattern_of_the_user(make_model: Callable[..., PreTrainedModel]) -> None:
    model = make_model("llama")
    check_settings(LoRASettings(r=4, alpha=8, target_modules=r".*\.(q|v)_proj"), model)
    check_settings(LoRASettings(r=48, alpha=8, target_modules="all-linear"), model)
    with pytest.raises(ConfigError, match=r"model\.lora\.r is 49; allowed: at most 48"):
        check_settings(LoRASettings(r=49, alpha=8, target_modules=["q_proj"]), model)
    with pytest.raises(
        ConfigError, match=r"target_modules is '\[', which is no regular expression"
    ):
        build(LoRASettings, {"r": 4, "alpha": 8, "target_modules": "["}, "model.lora")
