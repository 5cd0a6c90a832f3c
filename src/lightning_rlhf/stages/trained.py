"""The base model and the chat template that a `final/` folder was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_rlhf.core.errors import CheckpointError, ConfigError, require
from lightning_rlhf.core.validation import build
from lightning_rlhf.models.checkpoint import MANIFEST, Final
from lightning_rlhf.models.config import ModelConfig
from lightning_rlhf.stages.folder.changes import completed
from lightning_rlhf.stages.sections import section


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
        model = section(completed(config), "model")
        return build(ModelConfig, model, "model"), arguments
    except ConfigError as error:
        raise CheckpointError(f"{final.path / MANIFEST}: config: {error}") from error
