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
from lightning_rlhf.models.adapter import ADAPTER, check_adapter, check_for_model, check_settings
from lightning_rlhf.models.config import LoRASettings

from .conftest import Lineage


@pytest.fixture
def folder(tmp_path: Path, adapters: Lineage) -> Path:
    """A copy of an adapter of stage=rm."""
    shutil.copytree(adapters.rm.path, tmp_path / "rm")
    return tmp_path / "rm"


def say(folder: Path, **values: Any) -> None:
    file = folder / ADAPTER
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_ours_is_allowed(folder: Path, make_model: Callable[..., PreTrainedModel]) -> None:
    check_for_model(folder, make_model("llama"))


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("peft_type", "PROMPT_TUNING", "LORA"),
        ("peft_type", 5, "LORA"),
        ("r", 0, "a whole number >= 1"),
        ("r", True, "a whole number >= 1"),
        ("r", 4.0, "a whole number >= 1"),
        ("lora_alpha", "8", "a number"),
        ("lora_alpha", 10**400, "a number"),
        ("lora_dropout", 2, "a number from 0 to 1"),
        ("target_modules", 5, "text, a list of text, null"),
        ("target_modules", [["q_proj"]], "text, a list of text, null"),
        ("exclude_modules", {"a": 1}, "text, a list of text, null"),
        ("modules_to_save", [1], "text, a list of text, null"),
        ("rank_pattern", [1], "names with a whole number >= 1"),
        ("rank_pattern", {"q_proj": "8"}, "names with a whole number >= 1"),
        ("alpha_pattern", {"q_proj": None}, "names with a number"),
        ("use_dora", 1, "true, false"),
        ("layer_replication", [[0, 10**9]], "null"),
        ("megatron_config", {"a": 1}, "null"),
        ("base_model_name_or_path", 5, "text, null"),
    ],
)
def test_a_value_is_refused(folder: Path, key: str, value: Any, allowed: str) -> None:
    say(folder, **{key: value})
    with pytest.raises(CheckpointError) as error:
        check_adapter(folder)
    caught = str(error.value)
    assert caught.startswith(f"{folder} cannot be loaded: {ADAPTER}: {key} is ")
    assert caught.endswith(f"; allowed: {allowed}")


@pytest.mark.parametrize(
    ("values", "key"), [({"r": 10**9}, "r"), ({"rank_pattern": {"up_proj": 49}}, "up_proj")]
)
def test_a_rank_above_the_layers(
    folder: Path, values: dict[str, Any], key: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    """Layers have 32 and 48 inputs and outputs; the vocabulary of 97 has none."""
    say(folder, **values)
    with pytest.raises(CheckpointError, match=f"{key} is .*; allowed: at most 48"):
        check_for_model(folder, make_model("llama"))


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
