"""Checks of an adapter's configuration, made before PEFT acts on it.

PEFT reads some of its values as regular expressions, and a regular expression can be written that
takes years to match the name of a single layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from lightning_rlhf.core.errors import CheckpointError, ConfigError, require
from lightning_rlhf.core.validation import LARGEST, allowed, described, fits
from lightning_rlhf.io.bounded import MEMORY, bounded
from lightning_rlhf.models.config import LoRASettings
from lightning_rlhf.models.weights import ADAPTER, json_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MATCHING_SECONDS = 2.0
"""Processor time, in seconds, allowed for matching all patterns of an adapter with all layer
names."""
BY_PATTERN = ("rank_pattern", "alpha_pattern")
"""Keys of adapter_config.json whose values map patterns of layer names to numbers."""


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
    """Raise CheckpointError where ranks or patterns of the folder's adapter do not fit the model.

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
    if (found := unmatched(_patterns(config), model)) is not None:
        raise CheckpointError(f"{start}{found}")


def check_settings(settings: LoRASettings, model: PreTrainedModel) -> None:
    """Raise ConfigError where the rank or the pattern of a new adapter does not fit the model."""
    largest = largest_layer(model)
    require(settings.r <= largest, "model.lora.r", settings.r,
            f"at most {largest}, the model's largest layer")  # fmt: skip
    targets = settings.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        found = unmatched({"model.lora.target_modules": [(targets, re.Pattern.fullmatch)]}, model)
        if found is not None:
            raise ConfigError(f"{found}; allowed: a list of module names, or all-linear")


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


Matches = Callable[[re.Pattern[str], str], Any]
Patterns = Mapping[str, list[tuple[str, Matches]]]
"""Key -> the regular expressions that PEFT builds from its value, each with its match function."""


def _patterns(config: Mapping[str, Any]) -> Patterns:
    found: dict[str, list[tuple[str, Matches]]] = {}
    for key in ("target_modules", "exclude_modules"):
        if isinstance(config.get(key), str) and config[key] != "all-linear":
            found[key] = [(config[key], re.Pattern.fullmatch)]
    for key, form in (
        ("modules_to_save", r"(^|.*\.){}($|\..*)"),
        ("layers_pattern", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."),
        *((key, r"(.*\.)?({})$") for key in BY_PATTERN),
    ):
        names = config.get(key) or []
        names = [names] if isinstance(names, str) else list(names)
        found[key] = [(form.replace("{}", name), re.Pattern.match) for name in names]
    return found


def unmatched(patterns: Patterns, model: PreTrainedModel) -> str | None:
    """Return the error message for the first invalid or too slow pattern; None if there is none."""
    names = [name for name, _ in model.named_modules()]
    for key, group in patterns.items():
        try:
            with bounded(MATCHING_SECONDS, MEMORY):
                for pattern, matches in group:
                    compiled = re.compile(pattern)
                    for name in names:
                        matches(compiled, name)
        except (TimeoutError, MemoryError):
            return (
                f"{key} takes more than {MATCHING_SECONDS:g} s of processor time to be matched "
                "with the names of the model's layers"
            )
        except (re.error, RecursionError, OverflowError) as error:
            return f"{key} is no regular expression: {error}"
    return None
