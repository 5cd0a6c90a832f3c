"""Quantised weights of bitsandbytes: how they are asked for, and what they take.

bitsandbytes itself is imported by quantized_layers.py alone, and only for a quantised model: not
every machine has a build of it.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from lightning_rlhf.core.config import Quantization
from lightning_rlhf.core.errors import ConfigError, first_line


def quantization_config(
    quantization: Quantization, dtype: torch.dtype
) -> BitsAndBytesConfig | None:
    """Return the settings of bitsandbytes for int8 or nf4 weights (QLoRA); None without.

    dtype: data type in which nf4 layers compute.

    Raises ConfigError where bitsandbytes cannot be imported.
    """
    if quantization == "none":
        return None
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:  # a build for another machine raises errors of any type
        raise ConfigError(
            f"model.quantization is '{quantization}', but bitsandbytes cannot be imported "
            f"({first_line(error)}); allowed: none, or install bitsandbytes"
        ) from error
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def quantization_of(model: PreTrainedModel) -> str:
    """Return the kind of a model's weights: none, int8, nf4, or another method's name."""
    if not getattr(model, "is_quantized", False):
        return "none"
    config = model.config.quantization_config
    if getattr(config, "load_in_8bit", False):
        return "int8"
    return str(getattr(config, "bnb_4bit_quant_type", type(config).__name__))


def scale_bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of the scales beside a quantised parameter; 0 of any other."""
    if (state := getattr(parameter, "quant_state", None)) is not None:
        return int(state.absmax.nbytes)
    return 4 * len(parameter) if parameter.dtype == torch.int8 else 0
