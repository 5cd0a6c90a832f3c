"""What PPO maximises: the components of a reward. Values live in conf/reward/*.yaml.

A component is named by its place in the configuration, so that an error can name the key:
`reward` where there is one, `reward.components.NAME` where there are several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_rlhf.core.classifier_config import ClassifierConfig
from lightning_rlhf.core.config import (
    DType,
    Normalization,
    Quantization,
    Term,
    require,
    require_flag,
    require_number,
    require_one_of,
    require_text,
)
from lightning_rlhf.rewards.address import parsed

FormatCheck = Literal["strict", "warn", "off"]
Unfit = Literal["refuse", "warn"]
LARGEST_FACTOR = 1e30
"""Largest factor or bound of a score: fp32, in which scores are, ends at 3.4e38."""
DAY_S = 86_400
"""Longest time that may be waited for, in seconds."""


@dataclass(frozen=True, kw_only=True)
class ComponentConfig:
    """What every component has."""

    kind: str
    weight: float
    normalization: Normalization
    clip: float | None

    def check(self, key: str) -> None:
        """Raise ConfigError naming `key.…` where a value is out of bounds."""
        require_number(
            f"{key}.weight", self.weight, at_least=-LARGEST_FACTOR, at_most=LARGEST_FACTOR
        )
        require_one_of(f"{key}.normalization", self.normalization, get_args(Normalization))
        if self.clip is not None:
            require_number(f"{key}.clip", self.clip, above=0, at_most=LARGEST_FACTOR)

    def term(self, name: str) -> Term:
        """How it enters the sum."""
        return Term(name=name, weight=self.weight, normalization=self.normalization, clip=self.clip)


@dataclass(frozen=True, kw_only=True)
class RandomConfig(ComponentConfig):
    """A random head on the SFT model, to debug the loop."""

    def check(self, key: str) -> None:
        """As ComponentConfig.check."""
        super().check(key)
        not_stored(key, self.normalization, "a random head has no scale that was measured")


@dataclass(frozen=True, kw_only=True)
class LearnedConfig(ComponentConfig):
    """What every reward model has: its format is checked before PPO starts."""

    format_check: FormatCheck
    format_tolerance: float
    """Largest gap to the reward model's own scores, root mean square, in their deviations."""
    unfit: Unfit = "refuse"
    """What stage=ppo does where its fitness report says that the reward is unfit. The
    configuration in a folder of an older version lacks it."""

    def check(self, key: str) -> None:
        """As ComponentConfig.check."""
        super().check(key)
        require_one_of(f"{key}.format_check", self.format_check, get_args(FormatCheck))
        require_number(f"{key}.format_tolerance", self.format_tolerance, above=0)
        require_one_of(f"{key}.unfit", self.unfit, get_args(Unfit))


@dataclass(frozen=True, kw_only=True)
class HeadConfig(LearnedConfig):
    """A reward model of stage=rm that reads the policy's own tokens."""

    checkpoint: str | None
    """final/ folder or hub id; None is that of the same run."""
    uncertainty_coef: float
    """Price of the deviation between the heads of an ensemble."""

    def check(self, key: str) -> None:
        """As ComponentConfig.check."""
        super().check(key)
        require_number(
            f"{key}.uncertainty_coef", self.uncertainty_coef, at_least=0, at_most=LARGEST_FACTOR
        )
        if self.checkpoint is not None:
            require_text(f"{key}.checkpoint", self.checkpoint, "a folder, a hub id, or null")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LearnedConfig, ClassifierConfig):
    """A reward model of any family, which reads text through its own tokenizer and template."""

    device: str | None
    """Where it computes; None is where the policy does."""
    batch_size: int
    uncertainty_coef: float
    """As HeadConfig.uncertainty_coef, for what stage=rm trained."""

    def check(self, key: str) -> None:
        """As ComponentConfig.check."""
        super().check(key)
        require_text(f"{key}.name_or_path", self.name_or_path, "a folder or hub id")
        for name in ("revision", "tokenizer", "chat_template", "attn_implementation"):
            if getattr(self, name) is not None:
                require_text(f"{key}.{name}", getattr(self, name), "text, or null")
        require_one_of(f"{key}.dtype", self.dtype, (None, *get_args(DType)))
        require_one_of(f"{key}.quantization", self.quantization, get_args(Quantization))
        require_flag(f"{key}.trust_remote_code", self.trust_remote_code)
        if isinstance(self.label, str):
            require_text(f"{key}.label", self.label, "a number, the name of an output, or null")
        elif self.label is not None:
            require_number(f"{key}.label", self.label, at_least=0, whole=True)
        require_number(f"{key}.batch_size", self.batch_size, at_least=1, whole=True)
        if self.max_tokens is not None:
            require_number(f"{key}.max_tokens", self.max_tokens, at_least=1, whole=True)
        require_number(
            f"{key}.uncertainty_coef", self.uncertainty_coef, at_least=0, at_most=LARGEST_FACTOR
        )
        if self.device not in (None, "cpu"):
            require_device(f"{key}.device", self.device)


def require_device(key: str, name: Any) -> None:
    """Raise ConfigError unless torch can compute on the device `name`."""
    import torch  # which takes seconds: a configuration that names no device is read without it

    try:
        torch.empty(0, device=name)
        is_there = name != "meta"
    except (RuntimeError, AssertionError, TypeError):
        is_there = False
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = f"null, cpu, cuda:0 to cuda:{count - 1}" if count else "null, cpu"
    require(is_there, key, name, allowed)


@dataclass(frozen=True, kw_only=True)
class FunctionConfig(ComponentConfig):
    """A function of the texts."""

    path: str
    """`path/to/file.py:name` or `package.module:name`."""
    arguments: dict[str, Any]

    def check(self, key: str) -> None:
        """As ComponentConfig.check."""
        super().check(key)
        not_stored(key, self.normalization, "a function has no scale that was measured")
        allowed = "path/to/file.py:name, package.module:name"
        require_text(f"{key}.path", self.path, allowed)
        require(":" in self.path, f"{key}.path", self.path, allowed)
        is_mapping = isinstance(self.arguments, dict) and all(
            isinstance(name, str) for name in self.arguments
        )
        require(is_mapping, f"{key}.arguments", self.arguments, "a mapping of names to values")


@dataclass(frozen=True, kw_only=True)
class HTTPConfig(ComponentConfig):
    """A server that is asked for scores."""

    url: str
    batch_size: int
    timeout_s: float
    retries: int
    backoff_s: float
    cache_size: int
    token_env: str | None

    def check(self, key: str) -> None:
        """As ComponentConfig.check."""
        super().check(key)
        not_stored(key, self.normalization, "a server tells no scale")
        parsed(self.url, f"{key}.url")
        require_number(f"{key}.batch_size", self.batch_size, at_least=1, whole=True)
        require_number(f"{key}.timeout_s", self.timeout_s, above=0, at_most=DAY_S)
        require_number(f"{key}.retries", self.retries, at_least=0, whole=True)
        require_number(f"{key}.backoff_s", self.backoff_s, at_least=0, at_most=DAY_S)
        require_number(f"{key}.cache_size", self.cache_size, at_least=0, whole=True)
        is_name = isinstance(self.token_env, str) and bool(self.token_env.strip())
        require(self.token_env is None or is_name, f"{key}.token_env", self.token_env,
                "the name of an environment variable, or null")  # fmt: skip


def not_stored(key: str, normalization: Normalization, why: str) -> None:
    """Raise ConfigError where a component is to be standardised by what nobody measured."""
    require(normalization != "stored", f"{key}.normalization", normalization,
            f"none, running: {why}")  # fmt: skip
