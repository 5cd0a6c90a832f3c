"""Addition of LoRA adapters to a model: new ones, and those of a checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel

from lightning_rlhf.core.errors import CheckpointError, first_line
from lightning_rlhf.models.adapter import check_for_model, check_settings
from lightning_rlhf.models.config import LoRASettings
from lightning_rlhf.models.loading import naming
from lightning_rlhf.models.weights import check_weights


def with_new_adapter(
    model: PreTrainedModel | PeftModel, name: str, settings: LoRASettings, seed: int
) -> PeftModel:
    """Return the model with a new adapter, whose initial weights depend on (seed, name) alone.

    Raises: ConfigError where `settings` do not fit the model, CheckpointError where PEFT finds no
        module to adapt.
    """
    check_settings(settings, _without_adapters(model))
    targets = settings.target_modules
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    start = np.random.SeedSequence((seed, *name.encode())).generate_state(1)
    try:
        with torch.random.fork_rng(devices=[]):  # PEFT draws the weights on the CPU
            torch.manual_seed(int(start[0]))
            if isinstance(model, PeftModel):
                model.add_adapter(name, config)
                return model
            return PeftModel(model, config, adapter_name=name)
    except ValueError as error:
        raise CheckpointError(
            f"model.lora.target_modules={targets}: {first_line(error)}"
        ) from error


def with_loaded_adapter(model: PreTrainedModel | PeftModel, name: str, folder: Path) -> PeftModel:
    """Return the model with the adapter of a `final/` folder. Raises CheckpointError."""
    check_weights(folder)
    check_for_model(folder, _without_adapters(model))
    with naming(str(folder), name), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*missing adapter keys.*")
        if isinstance(model, PeftModel):
            model.load_adapter(str(folder), adapter_name=name)
            return model
        return PeftModel.from_pretrained(model, str(folder), adapter_name=name)


def _without_adapters(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model
