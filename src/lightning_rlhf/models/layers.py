"""Layers of transformers that take fewer passes over the activations, or shorter ones."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    Qwen3_5MLP,
    Qwen3_5RMSNorm,
)

from lightning_rlhf.core.products import by_onednn, linear, product

SILU = (nn.SiLU, SiLUActivation)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST_CHUNK = 40  # tokens; what costs most of the delta rule grows with its square


class _Norm(nn.Module):
    """y = w x / rms(x), in fp32, and rounded once; most of the library's round x / rms(x) too."""

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        if not is_known_norm(self, x):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        return _Normed.apply(x, *weight_and_eps(self))  # type: ignore


def is_known_norm(norm: nn.Module, x: Tensor) -> bool:
    """Whether it is one of `QUICK` in the dtype of x."""
    return (
        isinstance(norm, _Norm)
        and x.dtype == norm.get_parameter("weight").dtype
        and x.dtype in DTYPES
    )


def weight_and_eps(norm: Any) -> tuple[Float[Tensor, " d"], float]:
    """Of a norm of `QUICK`, or of its class in the library: w in fp32, and what is added."""
    if isinstance(norm, Qwen3_5RMSNorm):  # which learns w - 1
        return 1 + norm.weight.float(), norm.eps
    return norm.weight.float(), norm.variance_epsilon


class _SwiGLU(nn.Module):
    """down(silu(gate(x)) up(x)), of which the gradient needs one tensor less."""

    act_fn: nn.Module
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        if not (isinstance(self.act_fn, SILU) and torch.is_grad_enabled()):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        gated: Tensor = _Gated.apply(self.gate_proj(x), self.up_proj(x))  # type: ignore
        return self.down_proj(gated)  # type: ignore[no-any-return]


class QuickDeltaNet(Qwen3_5GatedDeltaNet):
    """Linear attention in chunks of equal length, on a CPU.

    The library fills every sequence up to a multiple of 64 tokens.
    """

    def forward(self, hidden_states: Float[Tensor, "B S d"], *args: Any, **kwargs: Any) -> Tensor:
        """[B, S, d]."""
        if hidden_states.device.type == "cpu":
            length = hidden_states.shape[1]
            kwargs["chunk_size"] = -(-length // -(-length // LONGEST_CHUNK))
        return super().forward(hidden_states, *args, **kwargs)


class QuickProjection(nn.Linear):
    """A linear layer whose products the faster library computes."""

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        if (
            x.dtype != self.weight.dtype
            or x.shape[-1] != self.in_features
            or torch.is_autocast_enabled("cpu")
            or not by_onednn(x, self.out_features)
        ):
            return super().forward(x)
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = _Projected.apply(rows, self.weight, self.bias)  # type: ignore
        return y.view(*x.shape[:-1], len(self.weight))


LINEAR = nn.Linear, QuickProjection
"""What is W x + b and no more."""
QUICK: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: QuickProjection,
    Qwen3_5GatedDeltaNet: QuickDeltaNet,
} | {
    layer: type(f"Quick{layer.__name__}", (forward, layer), {})
    for layer, forward in {
        LlamaMLP: _SwiGLU,
        Qwen2MLP: _SwiGLU,
        Qwen3MLP: _SwiGLU,
        Qwen3_5MLP: _SwiGLU,
        LlamaRMSNorm: _Norm,
        Qwen2RMSNorm: _Norm,
        Qwen3RMSNorm: _Norm,
        Qwen3_5RMSNorm: _Norm,
    }.items()
}
"""The library's class -> ours, which falls back to it."""


class _Projected(torch.autograd.Function):
    """x W^T + b."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "n i"], weight: Float[Tensor, "o i"], bias: Tensor | None
    ) -> Float[Tensor, "n o"]:
        wanted_x, wanted_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if wanted_weight else None, weight if wanted_x else None)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "n o"]) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (
            None if weight is None else product(dy, weight),
            None if x is None else product(dy.T, x),
            dy.sum(0) if ctx.needs_input_grad[2] else None,
        )


class _Gated(torch.autograd.Function):
    """silu(gate) up; autograd of the formula keeps silu(gate) too."""

    @staticmethod
    def forward(
        ctx: Any, gate: Float[Tensor, "*n d"], up: Float[Tensor, "*n d"]
    ) -> Float[Tensor, "*n d"]:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Float[Tensor, "*n d"]
    ) -> tuple[Float[Tensor, "*n d"], Float[Tensor, "*n d"]]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy * up, gate), F.silu(gate).mul_(dy)


class _Normed(torch.autograd.Function):
    """w x / rms(x), rms(x) = sqrt(mean(x^2) + eps), and its gradient.

        dx = g / rms - x <g, x> / (d rms^3),   g = w dy,   dw = sum of dy x / rms

    Autograd of the formula keeps three tensors as large as x in fp32 and makes a dozen.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "*n d"], weight: Float[Tensor, " d"], eps: float
    ) -> Float[Tensor, "*n d"]:
        wide = x.float()
        scale = inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "*n d"]) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        wide, dy = x.float(), dy.float()
        dw = gain_gradient(dy, wide, scale) if ctx.needs_input_grad[1] else None
        return through_rms(dy * weight, wide, scale).to(x.dtype), dw, None


def inverse_rms(x: Float[Tensor, "*n d"], eps: float) -> Float[Tensor, "*n 1"]:
    """1 / sqrt(mean(x^2) + eps)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def gain_gradient(
    dy: Float[Tensor, "*n d"], x: Float[Tensor, "*n d"], scale: Float[Tensor, "*n 1"]
) -> Float[Tensor, " d"]:
    """The gradient of w where dy is that of w `scale` x."""
    return (dy * x).mul_(scale).flatten(0, -2).sum(0)


def through_rms(
    g: Float[Tensor, "*n d"], x: Float[Tensor, "*n d"], scale: Float[Tensor, "*n 1"]
) -> Float[Tensor, "*n d"]:
    """The gradient of x where g is that of `scale` x, scale = 1 / rms(x); g is written over."""
    along = (g * x).sum(-1, keepdim=True).mul_(scale.pow(3)).div_(-x.shape[-1])
    return g.mul_(scale).addcmul_(x, along)
