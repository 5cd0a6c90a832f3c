"""The validated section `logger`; apart from the loggers, as Lightning loads slowly."""

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.validation import (
    STRICT,
    PositiveFloat,
    Text,
    build,
    check_value,
    described,
)

Kind = Literal["csv", "tensorboard", "wandb"]
WandbMode = Literal["auto", "online", "offline", "disabled"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoggerConfig:
    """The logger beside metrics.csv, if any."""

    kind: Kind


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WandbConfig(LoggerConfig):
    """Weights & Biases."""

    project: Annotated[Text, described("the name of a project")]
    entity: Annotated[Text, described("a user or team")] | None
    """User or team; None is the account's own default."""
    group: Annotated[Text, described("the name of a group")] | None
    """Group of runs; None is the name of the run for the jobs of a sweep, else no group."""
    tags: Annotated[tuple[Text, ...], Field(strict=False), described("a list of texts")]
    """Tags beside the stage and the model."""
    mode: WandbMode
    """auto is online if a key is found, else offline; the variable WANDB_MODE overrides it."""

    init_timeout_s: PositiveFloat
    """Seconds without an answer after which the run is offline."""
    finish_timeout_s: PositiveFloat
    """Seconds of uploading at the end, after which the rest stays in the run's folder."""

    def __post_init__(self) -> None:
        has_key = wandb_key_present() or os.getenv("WANDB_IDENTITY_TOKEN_FILE")
        if wandb_mode(self.mode) == "online" and not has_key:
            raise ConfigError(
                "W&B is to be online (logger.mode, or the variable WANDB_MODE), but WANDB_API_KEY "
                "and netrc hold no key; run `wandb login`, or give logger.mode=offline"
            )


def logger_config(options: Mapping[str, Any]) -> LoggerConfig:
    """Return the section `logger` of a configuration, checked."""
    kind = options["kind"]
    check_value("logger.kind", kind, Kind)
    return build(WandbConfig if kind == "wandb" else LoggerConfig, options, "logger")


def wandb_mode(mode: WandbMode) -> Any:
    """Return the mode W&B starts in: WANDB_MODE, else `mode`, else by whether there is a key."""
    if chosen := os.getenv("WANDB_MODE"):
        return chosen
    if mode == "auto":
        return "online" if wandb_key_present() else "offline"
    return mode


def wandb_key_present() -> bool:
    """Return whether the environment or netrc holds a key for W&B."""
    if os.getenv("WANDB_API_KEY"):
        return True
    url = os.getenv("WANDB_BASE_URL", "https://api.wandb.ai")
    path = Path(os.getenv("NETRC", "~/.netrc")).expanduser()
    return path.exists() and netrc.netrc(path).authenticators(urlsplit(url).netloc) is not None
