"""Quantised weights of bitsandbytes: how they are asked for, and where they can be computed."""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from lightning_rlhf.core.config import Quantization
from lightning_rlhf.core.errors import ConfigError, first_line


def quantization_config(
    quantization: Quantization, dtype: torch.dtype, key: str
) -> BitsAndBytesConfig | None:
    """Return the settings of bitsandbytes for int8 or nf4 weights (QLoRA); None without.

    dtype: data type in which nf4 layers compute.
    key: configuration key of `quantization`, for error messages.

    Raises ConfigError where bitsandbytes cannot be imported.
    """
    if quantization == "none":
        return None
    require_bitsandbytes(quantization, key)
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


def require_bitsandbytes(quantization: Quantization, key: str) -> None:
    """Raise ConfigError where bitsandbytes cannot be imported."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes  # noqa: F401  # which not every machine has a build of
    except Exception as error:  # a build for another machine raises errors of any type
        raise ConfigError(
            f"{key} is '{quantization}', but bitsandbytes cannot be imported "
            f"({first_line(error)}); allowed: none, or install bitsandbytes"
        ) from error


def check_quantization(quantization: Quantization, key: str, device: torch.device) -> None:
    """Raise ConfigError unless bitsandbytes computes such weights, and gradients, on `device`.

    A layer of 64 x 64 is computed, since its kernels depend on the device and on the build.
    key: configuration key of `quantization`.
    """
    if quantization == "none":
        return
    require_bitsandbytes(quantization, key)
    from lightning_rlhf.models.quantized_layers import computes_identity

    try:
        reason = None if computes_identity(quantization, device) else "the result is wrong"
    except Exception as error:  # a kernel that is missing raises errors of any type
        reason = first_line(error)
    if reason is not None:
        raise ConfigError(
            f"{key} is '{quantization}', which bitsandbytes cannot compute on {device.type} here "
            f"({reason}); allowed: none"
        )
