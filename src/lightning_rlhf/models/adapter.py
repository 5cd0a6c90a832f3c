"""Checks of an adapter's configuration, made before PEFT acts on it.

PEFT reads some of its values as regular expressions, and a regular expression can be written that
takes years to match the name of a single layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.core.bounded import MEMORY, bounded
from lightning_rlhf.core.config import LARGEST, require
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.core.reading import is_number
from lightning_rlhf.models.config import LoRASettings
from lightning_rlhf.models.weights import ADAPTER, json_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MATCHING_SECONDS = 2.0
"""Processor time, in seconds, allowed for matching all patterns of an adapter with all layer
names."""
BY_PATTERN = ("rank_pattern", "alpha_pattern")
"""Keys of adapter_config.json whose values map patterns of layer names to numbers."""


def _is_lora(x: Any) -> bool:
    return isinstance(x, str) and x == "LORA"


def _is_rank(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def _is_number(x: Any) -> bool:
    return is_number(x) and abs(x) <= LARGEST


def _is_share(x: Any) -> bool:
    return _is_number(x) and 0 <= x <= 1


def _are_ranks(x: Any) -> bool:
    return isinstance(x, dict) and all(map(_is_rank, x.values()))


def _are_numbers(x: Any) -> bool:
    return isinstance(x, dict) and all(map(_is_number, x.values()))


def _is_text(x: Any) -> bool:
    return isinstance(x, str | None)


def _are_names(x: Any) -> bool:
    return _is_text(x) or (isinstance(x, list) and all(isinstance(name, str) for name in x))


def _is_flag(x: Any) -> bool:
    return isinstance(x, bool)


def _is_null(x: Any) -> bool:
    return x is None


RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "peft_type": ("LORA", _is_lora),
    "base_model_name_or_path": ("text, null", _is_text),
    "r": ("a whole number >= 1", _is_rank),
    "lora_alpha": ("a number", _is_number),
    "lora_dropout": ("a number from 0 to 1", _is_share),
    "rank_pattern": ("names with a whole number >= 1", _are_ranks),
    "alpha_pattern": ("names with a number", _are_numbers),
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern",
         "target_parameters"),
        ("text, a list of text, null", _are_names),
    ),
    **dict.fromkeys(
        ("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias"), ("true, false", _is_flag)
    ),
    # layer_replication repeats layers of the base model; megatron_config names a Python module to
    # load.
    **dict.fromkeys(("layer_replication", "megatron_config"), ("null", _is_null)),
}  # fmt: skip
"""Key of adapter_config.json -> description of the allowed values, and the test of a value."""


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
    for key, (allowed, fits) in RULES.items():
        if key in config and not fits(config[key]):
            raise CheckpointError(
                f"{folder} cannot be loaded: {ADAPTER}: {key} is {_shown(config[key])}; allowed: "
                f"{allowed}"
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
    told = f"{folder} cannot be loaded: {ADAPTER}: "
    largest = largest_layer(model)
    ranks = {"r": config["r"]} if "r" in config else {}
    ranks |= {f"rank_pattern.{name}": r for name, r in dict(config.get("rank_pattern", {})).items()}
    for key, rank in ranks.items():
        if rank > largest:
            raise CheckpointError(
                f"{told}{key[:100]} is {rank}; allowed: at most {largest}, the model's largest "
                "layer"
            )
    if (found := unmatched(_patterns(config), model)) is not None:
        raise CheckpointError(f"{told}{found}")


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
