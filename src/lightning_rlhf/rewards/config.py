"""The validated components of a reward. Values live in conf/reward/*.yaml.

A component is named by its place in the configuration, so that an error can name the key:
`reward` where there is one, `reward.components.NAME` where there are several. Secrets in addresses
of servers are sent but never shown.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.core import errors, validation
from lightning_rlhf.core.config import ClassifierConfig, Normalization, Term

if TYPE_CHECKING:
    from urllib3.util import Url


HIDDEN = "***"
"""Text shown in place of a secret."""
ALLOWED = "http://HOST:PORT/PATH or https://..."
VARIABLE = "the name of an environment variable"


def redacted(url: str) -> str:
    """Return an address, or any text, without user, password and query, which may hold tokens."""
    without_user = re.sub(r"^([\w+.-]*://|//)?.*@", rf"\1{HIDDEN}@", url, flags=re.DOTALL)
    return re.sub(r"[?#].*", f"?{HIDDEN}", without_user, flags=re.DOTALL)


def parsed(url: str, key: str) -> Url:
    """Return the parts of the address. Raises ConfigError, which shows none of its secrets."""
    from urllib3.exceptions import LocationParseError
    from urllib3.util import parse_url

    try:
        parts = parse_url(url)
    except LocationParseError:
        parts = parse_url("")
    is_whole = parts.scheme in ("http", "https") and bool(parts.host)
    errors.require(is_whole, key, redacted(url), ALLOWED)
    return parts


def token_in(variable: str, key: str) -> str:
    """Return the token in the environment variable that the configuration key `key` names.

    Raises ConfigError, which does not show the token, if there is none.
    """
    token = os.environ.get(variable, "").strip()
    is_token = re.fullmatch(r"[!-~]+", token) is not None
    errors.require(is_token, key, variable, "an environment variable that holds a token, or null")
    return token


FormatCheck = Literal["strict", "warn", "off"]
Unfit = Literal["refuse", "warn"]
LARGEST_FACTOR = 1e30
"""Largest factor or bound of a score: fp32, in which scores are, ends at 3.4e38."""
DAY_S = 86_400
"""Longest time that may be waited for, in seconds."""
Coefficient = Annotated[float, Field(ge=0, le=LARGEST_FACTOR)]
Checkpoint = Annotated[validation.Text, validation.described("a folder, a hub id")]


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class ComponentConfig:
    """Keys of every component."""

    no_scale: ClassVar[str] = ""
    """Why no scale was measured by which the component could be standardised; "" if one was."""
    kind: str
    weight: Annotated[float, Field(ge=-LARGEST_FACTOR, le=LARGEST_FACTOR)]
    normalization: Normalization
    clip: Annotated[float, Field(gt=0, le=LARGEST_FACTOR)] | None

    def __post_init__(self) -> None:
        holds, allowed = self.normalization != "stored", f"none, running: {self.no_scale}"
        validation.rule(holds or not self.no_scale, "normalization", self.normalization, allowed)

    def term(self, name: str) -> Term:
        """Return how the component enters the sum under `name`."""
        return Term(name=name, weight=self.weight, normalization=self.normalization, clip=self.clip)

    def check(self, key: str) -> None:
        """Raise ConfigError naming `key.…` where its device or its address is not one."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class RandomConfig(ComponentConfig):
    """A random head on the SFT model, to debug the loop."""

    no_scale = "a random head has no scale that was measured"


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class LearnedConfig(ComponentConfig):
    """Keys of every reward model, whose format is checked before PPO starts."""

    format_check: FormatCheck
    format_tolerance: validation.PositiveFloat
    """Largest gap to the reward model's own scores, root mean square, in their deviations."""
    unfit: Unfit
    """Conduct of stage=ppo where its fitness report says that the reward is unfit."""
    uncertainty_coef: Coefficient
    """Penalty on the deviation between the heads of an ensemble that stage=rm trained."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class HeadConfig(LearnedConfig):
    """A reward model of stage=rm that reads the policy's own tokens."""

    checkpoint: Checkpoint | None
    """final/ folder or hub id; None is that of the same run."""
    step_separator: Annotated[str, Field(min_length=1)] | None
    """Text that ends a step of a response, whose last token is scored; None scores the whole."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class TextModelConfig(LearnedConfig, ClassifierConfig):
    """A reward model of any family, which reads text through its own tokenizer and template."""

    device: Annotated[str, validation.described("a device of torch")] | None
    """Device on which it computes; None is the policy's."""
    batch_size: validation.PositiveInt

    def check(self, key: str) -> None:
        """Raise ConfigError as `ComponentConfig.check` does."""
        if self.device in (None, "cpu"):
            return
        import torch  # which takes seconds: a configuration that names no device is read without it

        kind = torch.accelerator.current_accelerator(check_available=True)
        devices = ["cpu", *(f"{kind}:{i}" for i in range(torch.accelerator.device_count()))]
        known = {*devices, *(device.partition(":")[0] for device in devices)}
        errors.require(
            self.device in known, f"{key}.device", self.device, f"null, {', '.join(devices)}"
        )


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class FunctionConfig(ComponentConfig):
    """A function of the texts."""

    no_scale = "a function has no scale that was measured"
    path: Annotated[
        validation.Text, Field(pattern=":", description="path/to/file.py:name, package.module:name")
    ]
    arguments: validation.Options


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class HTTPConfig(ComponentConfig):
    """A server that is asked for scores."""

    no_scale = "a server has no scale"
    url: Annotated[str, validation.described(ALLOWED)]
    batch_size: validation.PositiveInt
    timeout_s: Annotated[float, Field(gt=0, le=DAY_S)]
    retries: validation.NonNegativeInt
    backoff_s: Annotated[float, Field(ge=0, le=DAY_S)]
    cache_size: validation.NonNegativeInt
    token_env: Annotated[str, Field(pattern=r"\S", description=VARIABLE)] | None

    def check(self, key: str) -> None:
        """Raise ConfigError as `ComponentConfig.check` does."""
        parsed(self.url, f"{key}.url")
