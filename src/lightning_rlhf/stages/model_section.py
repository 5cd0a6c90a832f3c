"""The section `model` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_rlhf.models.config import LoRASettings, ModelConfig
from lightning_rlhf.stages.sections import build, frozen_lists, section


def read_model(tree: Mapping[str, Any]) -> ModelConfig:
    """Return the section `model` of a configuration, checked. Raises ConfigError naming the key."""
    model = dict(section(tree, "model", "lora"))
    lora = build(LoRASettings, frozen_lists(model["lora"]), "model.lora")
    return build(ModelConfig, model | {"lora": lora}, "model")
