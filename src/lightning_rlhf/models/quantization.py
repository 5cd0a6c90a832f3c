"""Quantised weights of bitsandbytes, and layers of them whose rows are independent of the batch."""

from __future__ import annotations

import logging
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.functional import int8_vectorwise_dequant
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
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

    try:
        reason = None if computes_identity(quantization, device) else "the result is wrong"
    except Exception as error:  # a kernel that is missing raises errors of any type
        reason = first_line(error)
    if reason is not None:
        raise ConfigError(
            f"{key} is '{quantization}', which bitsandbytes cannot compute on {device.type} here "
            f"({reason}); allowed: none"
        )


SIZE = 64
"""Number of inputs and of outputs of the layer that is tried: a block of nf4."""


class Int8Linear(bitsandbytes.nn.Linear8bitLt):  # type: ignore[misc]
    """A linear layer of 8-bit weights: y = x W^T + b, W = codes * scale / 127.

    Departs from LLM.int8(), https://arxiv.org/abs/2208.07339, which bitsandbytes' own layer
    computes: that also rounds activations to 8 bits, except columns in which any row of the batch
    exceeds a threshold. There a text's log-probabilities depend on the texts beside it, and the
    probability ratio of a policy that has not changed is not 1.
    """

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        if self.weight.SCB is not None:
            self.init_8bit_state()
        scales = self.state.SCB.to(x.device)  # moving a whole model moves the codes alone
        y: Tensor = _Int8Product.apply(x, self.weight.data, scales)  # type: ignore
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Int8Product(torch.autograd.Function):
    """x W^T, and the gradient of x; W is made of its codes for each product and is not kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "*n i"], codes: Int8[Tensor, "o i"], scales: Float[Tensor, " o"]
    ) -> Float[Tensor, "*n o"]:
        ctx.save_for_backward(codes, scales)
        return F.linear(x, int8_vectorwise_dequant(codes, scales).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "*n o"]) -> tuple[Tensor, None, None]:
        return dy @ int8_vectorwise_dequant(*ctx.saved_tensors).to(dy.dtype), None, None


def use_exact_layers(model: nn.Module) -> None:
    """Let the layers of bitsandbytes in `model` compute with their weights, dequantised.

    int8: see `Int8Linear`. nf4: packing for CPUs is disabled, which requires output sizes that are
    multiples of 32, and passes no gradient on.
    """
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
        elif type(module) is bitsandbytes.nn.Linear8bitLt:
            module.__class__ = Int8Linear


def computes_identity(quantization: Quantization, device: torch.device) -> bool:
    """Return whether a quantised layer of identity weights returns its input, and its gradient.

    Both kinds have exact codes for 0 and for the largest weight, so that only the rounding of the
    kernel is left, to 16 bits on some devices.
    """
    sizes: dict[str, Any] = {"bias": False, "device": "meta"}
    identity = torch.eye(SIZE)
    if quantization == "nf4":
        layer = bitsandbytes.nn.Linear4bit(SIZE, SIZE, quant_type="nf4", **sizes)
        weight = bitsandbytes.nn.Params4bit(identity, quant_type="nf4", requires_grad=False)
    else:
        layer = bitsandbytes.nn.Linear8bitLt(SIZE, SIZE, has_fp16_weights=False, **sizes)
        weight = bitsandbytes.nn.Int8Params(identity, requires_grad=False)
    layer.weight = weight.to(device)
    use_exact_layers(layer)
    x = torch.linspace(-1, 1, SIZE, device=device)[None].requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    worst = torch.stack([(y - x).abs().amax(), (x.grad - 1).abs().amax()]).amax()
    return bool(worst < 0.02)
