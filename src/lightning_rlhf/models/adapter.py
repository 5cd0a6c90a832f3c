"""Checks of an adapter's configuration, made before PEFT acts on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from lightning_rlhf.core.errors import CheckpointError, require
from lightning_rlhf.core.validation import LARGEST, allowed, described, fits
from lightning_rlhf.models.config import LoRASettings
from lightning_rlhf.models.weights import ADAPTER, json_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Rank = Annotated[int, Field(ge=1), described("a whole number >= 1")]
_Number = Annotated[int | float, Field(ge=-LARGEST, le=LARGEST), described("a number")]
_Names = Annotated[str | list[str] | None, described("text, a list of text, null")]
KEYS: Mapping[str, Any] = {
    "peft_type": Literal["LORA"],
    "base_model_name_or_path": Annotated[str | None, described("text, null")],
    "r": _Rank,
    "lora_alpha": _Number,
    "lora_dropout": Annotated[float, Field(ge=0, le=1), described("a number from 0 to 1")],
    "rank_pattern": Annotated[dict[str, _Rank], described("names with a whole number >= 1")],
    "alpha_pattern": Annotated[dict[str, _Number], described("names with a number")],
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern",
         "target_parameters"), _Names,
    ),
    **dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias"), bool),
    # layer_replication repeats layers of the base model; megatron_config names a Python module to
    # load.
    **dict.fromkeys(
        ("layer_replication", "megatron_config"), Annotated[None, described("null")]
    ),
}  # fmt: skip
"""Key of adapter_config.json -> type of its values."""


def check_adapter(folder: Path) -> None:
    """Raise CheckpointError unless the folder's adapter_config.json is that of a LoRA adapter.

    Missing keys take PEFT's defaults; PEFT ignores keys that it does not know.
    """
    config = json_object(folder / ADAPTER)
    for key in ("peft_type", "base_model_name_or_path"):
        if key not in config:
            raise CheckpointError(
                f"{folder / ADAPTER} does not describe an adapter: it lacks {key}"
            )
    for key, kind in KEYS.items():
        if key in config and not fits(config[key], kind):
            raise CheckpointError(
                f"{folder} cannot be loaded: {ADAPTER}: {key} is {_shown(config[key])}; allowed: "
                f"{allowed(kind)}"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def check_for_model(folder: Path, model: PreTrainedModel) -> None:
    """Raise CheckpointError where a rank of the folder's adapter does not fit the model.

    `check_adapter` is applied first.
    """
    check_adapter(folder)
    config = json_object(folder / ADAPTER)
    start = f"{folder} cannot be loaded: {ADAPTER}: "
    largest = largest_layer(model)
    ranks = {"r": config["r"]} if "r" in config else {}
    ranks |= {f"rank_pattern.{name}": r for name, r in dict(config.get("rank_pattern", {})).items()}
    for key, rank in ranks.items():
        if rank > largest:
            raise CheckpointError(
                f"{start}{key[:100]} is {rank}; allowed: at most {largest}, the model's largest "
                "layer"
            )


def check_settings(settings: LoRASettings, model: PreTrainedModel) -> None:
    """Raise ConfigError where the rank of a new adapter does not fit the model."""
    largest = largest_layer(model)
    require(settings.r <= largest, "model.lora.r", settings.r,
            f"at most {largest}, the model's largest layer")  # fmt: skip


def largest_layer(model: PreTrainedModel) -> int:
    """Return the largest number of inputs or outputs of a linear layer other than the output
    layer."""
    output = model.get_output_embeddings()
    sizes = [
        getattr(module, name)
        for module in model.modules()
        if module is not output
        for name in ("in_features", "out_features", "nx", "nf")  # GPT-2's have other names
        if isinstance(getattr(module, name, None), int)
    ]
    return max([*sizes, int(model.config.get_text_config().hidden_size)])
