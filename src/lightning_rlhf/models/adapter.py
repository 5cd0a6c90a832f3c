"""Checks of a folder's weight files and adapter configuration, made before a library reads them.

Only safetensors are read, which hold tensors alone: a pickle can run code of whoever wrote it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.io.user_code import nearest_path

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
        shards = json_object(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(
            str(name).endswith(".safetensors") for name in shards.values()
        ):
            raise CheckpointError(f"{folder / INDEX} does not name shards that end in .safetensors")
    if names != (OF_ADAPTER,):
        check_references(folder / "config.json")


def check_references(config: Path) -> None:
    """Raise CheckpointError where a model's configuration refers to weights or code elsewhere.

    An attention implementation named org/repository is code on the hub, which transformers would
    download and run. Numbers of layers below 1 or above DEEPEST are refused too.
    """
    found = json_object(config)
    name = found.get("transformers_weights")
    if name and not str(name).endswith(".safetensors"):
        raise CheckpointError(f"{config}: transformers_weights is {name!r}; allowed: *.safetensors")
    for key, value in attention_of_the_hub(found):
        raise CheckpointError(
            f"{config}: {key} is {value!r}, code on the hub; allowed: eager, sdpa, "
            "flash_attention_2, or none and model.attn_implementation"
        )
    for key, layers in beyond_depth(found):
        raise CheckpointError(f"{config}: {key} is {layers}; allowed: 1 to {DEEPEST}")


def beyond_depth(tree: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the numbers of layers in a configuration, nested too, below 1 or above DEEPEST."""
    counts = nested(tree, LAYERS)
    return [(key, n) for key, n in counts if isinstance(n, int) and not 1 <= n <= DEEPEST]


def attention_of_the_hub(tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the keys of a configuration, nested too, that name attention as org/repository."""
    names = nested(tree, ("attn_implementation", "_attn_implementation"))
    return [(key, name) for key, name in names if "/" in str(name)]


def nested(
    tree: Mapping[str, Any], names: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the keys of these names, in the mappings inside too, joined by dots, with values."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from nested(value, names, f"{prefix}{key}.")
        elif key in names:
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


def check_adapter(folder: Path) -> None:
    """Raise CheckpointError unless the folder's adapter_config.json is that of a LoRA adapter.

    It may not repeat layers of the base model (layer_replication), nor name a Python module to
    load (megatron_config). PEFT refuses what else is wrong with it.
    """
    config = json_object(folder / ADAPTER)
    for key, allowed in (
        ("peft_type", ("LORA",)),
        ("layer_replication", (None,)),
        ("megatron_config", (None,)),
    ):
        if config.get(key) not in allowed:
            raise CheckpointError(
                f"{folder} cannot be loaded: {ADAPTER}: {key} is {config.get(key)!r:.100}; "
                f"allowed: {allowed[0] or 'null'}"
            )
    base = config.get("base_model_name_or_path", 0)
    if base is not None and not isinstance(base, str):
        raise CheckpointError(
            f"{folder} cannot be loaded: {ADAPTER} does not say by base_model_name_or_path which "
            "model it adapts"
        )
