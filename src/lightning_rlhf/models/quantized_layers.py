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
