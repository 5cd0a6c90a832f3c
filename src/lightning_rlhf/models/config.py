"""The validated configuration of a model. The values live in conf/model/*.yaml."""

from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.core.config import DType, KernelChoice, Quantization
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.validation import STRICT, Text, described, nested, rule

BASE, SFT, REFERENCE = "base", "sft", "reference"
POLICY, REWARD, CRITIC, VALUE = "policy", "reward", "critic", "value"
"""Names of the roles on one base model, and of the heads on it."""
LARGEST_RANK = 4096
"""Largest rank of an adapter."""
ModuleName = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoRASettings:
    """Low-rank adapters, https://arxiv.org/abs/2106.09685."""

    r: Annotated[int, Field(ge=1, le=LARGEST_RANK)]
    alpha: Annotated[int | float, Field(gt=0)]
    target_modules: Annotated[
        ModuleName | Annotated[tuple[ModuleName, ...], Field(strict=False, min_length=1)],
        described("a list of module names, or all-linear"),
    ]
    """Names of the linear layers to adapt, a regular expression for them, or "all-linear"."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """A causal language model: from the hub, from a folder, or built from a configuration."""

    name: Annotated[str, Field(min_length=1, description="a short name for the output folder")]
    """Name of the folder of its outputs."""
    name_or_path: Text | None
    """Hub id or local folder; null where `from_config` is given."""
    revision: Text | None
    from_config: Annotated[dict[str, Any], described("a configuration with model_type")] | None
    """Arguments of a transformers configuration, `model_type` among them: random weights."""
    tokenizer: Text | None
    """Hub id or folder of the tokenizer; null means the model's own."""
    dtype: DType
    quantization: Quantization
    attn_implementation: Text | None
    gradient_checkpointing: bool
    kernels: KernelChoice
    """Layers that compute: fast ones, the library's own, or what was measured to be faster."""
    trust_remote_code: bool
    lora: Annotated[LoRASettings, nested(LoRASettings)]

    def __post_init__(self) -> None:
        if (self.name_or_path is None) == (self.from_config is None):
            raise ConfigError(
                "exactly one of model.name_or_path (hub id or folder) and model.from_config "
                f"(a model with random weights) must be set; found {self.name_or_path!r} and "
                f"{'a configuration' if self.from_config else None!r}"
            )
        if (sizes := self.from_config) is not None:
            why, quantization = "since model.from_config has no", self.quantization
            rule("model_type" in sizes, "from_config", sizes, "a configuration with model_type")
            tokenizer = f"a folder or hub id, {why} tokenizer"
            rule(self.tokenizer is not None, "tokenizer", None, tokenizer)
            none = f"none, {why} weights to quantise"
            rule(quantization == "none", "quantization", quantization, none)
