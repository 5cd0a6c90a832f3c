"""Layers of quantised weights whose results depend on the row that they are given alone."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from bitsandbytes.functional import int8_vectorwise_dequant
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_rlhf.core.config import Quantization

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
