"""The configuration that a `final/` folder was trained with: base, chat template, sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_rlhf.core.errors import CheckpointError, ConfigError, require
from lightning_rlhf.core.validation import PositiveInt, Temperature, build, check_value
from lightning_rlhf.models.checkpoint import MANIFEST, Final
from lightning_rlhf.models.config import ModelConfig
from lightning_rlhf.runs.stage import section


def trained_as(final: Final) -> tuple[ModelConfig, Mapping[str, Any]]:
    """Return the base model and the chat template's arguments from a manifest.

    Raises CheckpointError where there is no manifest, or they are missing or not allowed.
    """
    if final.manifest is None:
        raise CheckpointError(f"{final.path} has no {MANIFEST}; allowed: the final/ of a run")
    config = final.manifest.config
    key = "chat_template_kwargs"
    try:
        arguments = section(config, "data", key)[key]
        is_mapping = isinstance(arguments, Mapping)
        require(is_mapping, f"data.{key}", arguments, "a mapping of names to values")
        return build(ModelConfig, section(config, "model"), "model"), arguments
    except ConfigError as error:
        raise CheckpointError(f"{final.path / MANIFEST}: config: {error}") from error


def short_names(finals: Sequence[Final]) -> list[str]:
    """Return a short name for each model: that of its stage's folder, where no other has it."""
    paths = [final.path.resolve() for final in finals]
    short = [path.parent.name if path.name == "final" else path.name for path in paths]
    names = [
        name if short.count(name) == 1 else str(path)
        for name, path in zip(short, paths, strict=True)
    ]
    if len({*names}) < len(names):
        raise ConfigError(f"FINAL names {names[0]} twice; allowed: each model once")
    return names


def reward_of(finals: Sequence[Final]) -> str | None:
    """Return the reward model that one of the models was trained on, where it is there."""
    for final in finals:
        folder = final.parent("reward")
        if folder is not None and folder.is_dir():
            return str(folder)
    return None


def sampled_as(final: Final) -> tuple[float, int]:
    """Return temperature and largest number of tokens with which a model was trained to respond.

    The temperature is 1, the model's own distribution, where its stage samples nothing.
    Raises CheckpointError where they are missing or not allowed.
    """
    assert final.manifest is not None
    config, stage, key = final.manifest.config, final.manifest.stage, "max_response_tokens"
    try:
        sampling = {"temperature": 1.0, **section(config, "data", key), **section(config, stage)}
        check_value(f"{stage}.temperature", sampling["temperature"], Temperature)
        check_value(f"{stage}.{key}", sampling[key], PositiveInt)
    except ConfigError as error:
        raise CheckpointError(f"{final.path / MANIFEST}: config: {error}") from error
    return sampling["temperature"], sampling[key]
