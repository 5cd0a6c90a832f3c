"""Checks of a folder's weight files and adapter configuration, made before a library reads them.

Only safetensors are read, which hold tensors alone: a pickle can run code of whoever wrote it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from lightning_rlhf.core.errors import CheckpointError, require
from lightning_rlhf.core.validation import LARGEST, allowed, described, fits
from lightning_rlhf.io.user_code import nearest_path
from lightning_rlhf.models.config import LoRASettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ADAPTER = "adapter_config.json"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OF_ADAPTER = "adapter_model.safetensors"
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
DEEPEST = 1000
"""Largest allowed number of layers; building one takes milliseconds, independent of its size."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def is_folder(source: str) -> bool:
    """Return True if `source` is a folder of this machine, not a hub id."""
    return os.path.isdir(os.path.expanduser(source))


def refuse_missing_folder(source: str, key: str) -> None:
    """Raise CheckpointError where `source` looks like a path, but there is no such folder."""
    if not is_folder(source) and (
        source.startswith(("/", ".", "~")) or source.count("/") > 1 or os.path.exists(source)
    ):
        raise missing_folder(source, key)


def missing_folder(source: str, key: str) -> CheckpointError:
    """Return the error about a folder that does not exist, with the nearest one that does."""
    return CheckpointError(
        f"{key}={source}: no such folder{nearest_path(source)}; allowed: a folder with "
        "config.json, weights and tokenizer, or a hub id"
    )


def check_weights(folder: Path) -> None:
    """Raise CheckpointError unless the folder holds its weights as safetensors.

    The weights of an adapter are required where the folder has adapter_config.json, else those of
    a whole model.
    """
    names = (OF_ADAPTER,) if (folder / ADAPTER).is_file() else (WHOLE, INDEX)
    found = [name for name in names if (folder / name).is_file()]
    if not found:
        pickles = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLES)
        has = "no weights"
        if pickles:
            has = f"only a pickle, {pickles[0]}, which may run code when it is read"
        raise CheckpointError(
            f"{folder} cannot be loaded: it has {has}; allowed: {' or '.join(names)}"
        )
    if found == [INDEX]:
        check_shards(folder / INDEX)
    if names != (OF_ADAPTER,):
        check_references(folder / "config.json")


def check_shards(index: Path) -> None:
    """Raise CheckpointError unless every shard in the index is a .safetensors file."""
    names = json_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(_is_safe(name) for name in names.values()):
        raise CheckpointError(f"{index} does not name shards that end in .safetensors")


def check_references(config: Path) -> None:
    """Raise CheckpointError where a model's configuration refers to weights or code elsewhere.

    An attention implementation named org/repository is code on the hub, which transformers would
    download and run. Numbers of layers below 1 or above DEEPEST are refused too.
    """
    found = json_object(config)
    name = found.get("transformers_weights")
    if name is not None and not _is_safe(name):
        raise CheckpointError(f"{config}: transformers_weights is {name!r}; allowed: *.safetensors")
    for key, value in attention_of_the_hub(found):
        raise CheckpointError(
            f"{config}: {key} is {value!r}, code on the hub; allowed: eager, sdpa, "
            "flash_attention_2, or none and model.attn_implementation"
        )
    for key, layers in beyond_depth(found):
        raise CheckpointError(f"{config}: {key} is {layers}; allowed: 1 to {DEEPEST}")


def beyond_depth(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the numbers of layers in a configuration, nested too, below 1 or above DEEPEST."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from beyond_depth(value, f"{prefix}{key}.")
        elif key in LAYERS and isinstance(value, int) and not 1 <= value <= DEEPEST:
            yield f"{prefix}{key}", value


def attention_of_the_hub(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a configuration, nested too, that name attention as org/repository."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from attention_of_the_hub(value, f"{prefix}{key}.")
        elif key in ("attn_implementation", "_attn_implementation") and "/" in str(value):
            yield f"{prefix}{key}", value


def json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError where it is missing or damaged."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{file} cannot be loaded: {reason}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no JSON object, but a {type(found).__name__}")
    return found


def _is_safe(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors")


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
