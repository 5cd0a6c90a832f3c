"""The section `logger` of a configuration; apart from the loggers, as Lightning loads slowly."""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from lightning_rlhf.core.config import require, require_number, require_one_of, require_text
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.core.reading import read_text

Kind = Literal["csv", "tensorboard", "wandb"]
WandbMode = Literal["auto", "online", "offline", "disabled"]
WANDB_ID = "wandb_id.txt"
"""File of a run folder with the id of the run in W&B."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """The logger beside metrics.csv, if any."""

    kind: Kind


@dataclass(frozen=True, kw_only=True)
class WandbConfig(LoggerConfig):
    """Weights & Biases."""

    project: str
    entity: str | None
    """User or team; None is the account's own default."""
    tags: Sequence[str]
    """Added to the stage and the model."""
    mode: WandbMode
    """auto is online if a key is found, else offline; the variable WANDB_MODE overrides it."""

    init_timeout_s: float
    """Without an answer by then the run is offline."""
    finish_timeout_s: float
    """What is not uploaded by then at the end stays in the run's folder."""

    def __post_init__(self) -> None:
        for key in ("init_timeout_s", "finish_timeout_s"):
            require_number(f"logger.{key}", getattr(self, key), above=0)
        require_text("logger.project", self.project, "the name of a project")
        if self.entity is not None:
            require_text("logger.entity", self.entity, "a user or team, or null")
        is_list = isinstance(self.tags, list | tuple)
        require(is_list, "logger.tags", self.tags, "a list of texts")
        for tag in self.tags:
            require_text("logger.tags", tag, "a list of texts")
        require_one_of("logger.mode", self.mode, get_args(WandbMode))
        has_key = wandb_key_present() or os.getenv("WANDB_IDENTITY_TOKEN_FILE")
        if wandb_mode(self.mode) == "online" and not has_key:
            raise ConfigError(
                "W&B is to be online (logger.mode, or the variable WANDB_MODE), but WANDB_API_KEY "
                "and netrc hold no key; run `wandb login`, or give logger.mode=offline"
            )


def logger_config(options: Mapping[str, Any]) -> LoggerConfig:
    """The section `logger` of a configuration, checked."""
    kind = options["kind"]
    require_one_of("logger.kind", kind, get_args(Kind))
    config = WandbConfig if kind == "wandb" else LoggerConfig
    keys = sorted(field.name for field in fields(config))
    found = sorted(map(str, options))
    if found != keys:
        raise ConfigError(f"logger has the keys {found}; logger={kind} wants {keys}")
    return config(**options)


def wandb_mode(mode: WandbMode) -> Any:
    """The mode W&B is started in: WANDB_MODE, else `mode`, else what the presence of a key says."""
    if chosen := os.getenv("WANDB_MODE"):
        return chosen
    if mode == "auto":
        return "online" if wandb_key_present() else "offline"
    return mode


def wandb_key_present() -> bool:
    """Whether the environment or netrc holds a key for W&B."""
    if os.getenv("WANDB_API_KEY"):
        return True
    url = os.getenv("WANDB_BASE_URL", "https://api.wandb.ai")
    path = Path(os.getenv("NETRC", "~/.netrc")).expanduser()
    return path.exists() and netrc.netrc(path).authenticators(urlsplit(url).netloc) is not None


def read_wandb_id(path: Path) -> str:
    """Return the id of the W&B run. Raises CheckpointError where the file holds none."""
    found = read_text(path)
    if re.fullmatch(r"[\w-]{1,64}", found) is None:
        raise CheckpointError(
            f"{path} is damaged: found {found[:40]!r}; allowed: the id of a W&B run. Delete it to "
            "go on as a new run of W&B"
        )
    return found
