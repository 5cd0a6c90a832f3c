"""What a model preset says. The values live in conf/model/*.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, get_args

from lightning_rlhf.core.config import (
    DType,
    KernelChoice,
    Quantization,
    require,
    require_flag,
    require_number,
    require_one_of,
    require_text,
)
from lightning_rlhf.core.errors import ConfigError

BASE, SFT, REFERENCE = "base", "sft", "reference"
POLICY, REWARD, CRITIC, VALUE = "policy", "reward", "critic", "value"
"""Roles that one base model plays, and the heads on it."""


@dataclass(frozen=True, kw_only=True)
class LoRASettings:
    """Low-rank adapters, https://arxiv.org/abs/2106.09685."""

    r: int
    alpha: float
    target_modules: str | tuple[str, ...]
    """Names of the linear layers that get an adapter, a regular expression for them, or
    "all-linear"."""

    def __post_init__(self) -> None:
        require_number("model.lora.r", self.r, at_least=1, whole=True)
        require_number("model.lora.alpha", self.alpha, above=0)
        targets = self.target_modules
        names = [targets] if isinstance(targets, str) else targets
        is_names = isinstance(names, list | tuple) and all(isinstance(n, str) and n for n in names)
        require(is_names and len(names) > 0, "model.lora.target_modules", targets,
                "a list of module names, or all-linear")  # fmt: skip
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except (re.error, RecursionError, OverflowError) as error:
                raise ConfigError(
                    f"model.lora.target_modules is {targets[:100]!r}, which is no regular "
                    f"expression: {error}; allowed: a list of module names, or all-linear"
                ) from error


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A causal language model: from the hub, from a folder, or built from a configuration."""

    name: str
    """Names the folder of its outputs."""
    name_or_path: str | None
    """Hub id or local folder; null where `from_config` is given."""
    revision: str | None
    from_config: dict[str, Any] | None
    """Arguments of a transformers configuration, `model_type` among them: random weights."""
    tokenizer: str | None
    """Hub id or folder of the tokenizer; null means the model's own."""
    dtype: DType
    quantization: Quantization
    attn_implementation: str | None
    gradient_checkpointing: bool
    compile: bool
    kernels: KernelChoice
    """Layers that compute: fast ones, the library's own, or what was measured to be faster."""
    trust_remote_code: bool
    lora: LoRASettings

    def __post_init__(self) -> None:
        if (self.name_or_path is None) == (self.from_config is None):
            raise ConfigError(
                "exactly one of model.name_or_path (hub id or folder) and model.from_config "
                f"(a model with random weights) must be set; found {self.name_or_path!r} and "
                f"{'a configuration' if self.from_config else None!r}"
            )
        for key in ("name_or_path", "revision", "tokenizer", "attn_implementation"):
            if getattr(self, key) is not None:
                require_text(f"model.{key}", getattr(self, key), "text, or null")
        if self.from_config is not None:
            is_mapping = isinstance(self.from_config, dict)
            require(is_mapping and "model_type" in self.from_config, "model.from_config",
                    self.from_config, "a configuration with model_type")  # fmt: skip
            require(self.tokenizer is not None, "model.tokenizer", None,
                    "a folder or hub id, since model.from_config has no tokenizer")  # fmt: skip
            require(self.quantization == "none", "model.quantization", self.quantization,
                    "none, since model.from_config has no weights to quantise")  # fmt: skip
        require(bool(self.name), "model.name", self.name, "a short name for the output folder")
        require_one_of("model.dtype", self.dtype, get_args(DType))
        require_one_of("model.quantization", self.quantization, get_args(Quantization))
        require_flag("model.gradient_checkpointing", self.gradient_checkpointing)
        require_flag("model.compile", self.compile)
        require_one_of("model.kernels", self.kernels, get_args(KernelChoice))
        if self.compile:
            require(self.kernels != "plain", "model.kernels", self.kernels,
                    "auto or fast with model.compile=true, which compiles fast layers")  # fmt: skip
        require_flag("model.trust_remote_code", self.trust_remote_code)
