"""Quantised weights of bitsandbytes: how they are asked for, what they take, how they compute.

bitsandbytes itself is imported for a quantised model alone: not every machine has a build of it.
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
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


def use_exact_layers(model: nn.Module) -> None:
    """Let the layers of bitsandbytes in `model` compute with their weights, dequantised.

    int8: see `int8_linear`. nf4: packing for CPUs is disabled, which requires output sizes that are
    multiples of 32, and passes no gradient on.
    """
    import bitsandbytes

    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.forward = partial(int8_linear, module)


def int8_linear(layer: Any, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
    """Compute a linear layer of 8-bit weights: y = x W^T + b, W = codes * scale / 127.

    Departs from LLM.int8(), https://arxiv.org/abs/2208.07339, which bitsandbytes' own layer
    computes: that also rounds activations to 8 bits, except columns in which any row of the batch
    exceeds a threshold. There a text's log-probabilities depend on the texts beside it, and the
    probability ratio of a policy that has not changed is not 1.
    """
    if layer.weight.SCB is not None:
        layer.init_8bit_state()
    scales = layer.state.SCB.to(x.device)  # moving a whole model moves the codes alone
    y: Tensor = _Int8Product.apply(x, layer.weight.data, scales)  # type: ignore
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


class _Int8Product(torch.autograd.Function):
    """x W^T, and the gradient of x; W is made of its codes for each product and is not kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "*n i"], codes: Int8[Tensor, "o i"], scales: Float[Tensor, " o"]
    ) -> Float[Tensor, "*n o"]:
        ctx.save_for_backward(codes, scales)
        return F.linear(x, _dequantised(codes, scales).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "*n o"]) -> tuple[Tensor, None, None]:
        return dy @ _dequantised(*ctx.saved_tensors).to(dy.dtype), None, None


def _dequantised(codes: Int8[Tensor, "o i"], scales: Float[Tensor, " o"]) -> Float[Tensor, "o i"]:
    from bitsandbytes.functional import int8_vectorwise_dequant

    return int8_vectorwise_dequant(codes, scales)
