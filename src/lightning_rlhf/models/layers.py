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

SILU = (nn.SiLU, SiLUActivation)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST_CHUNK = 40  # tokens; what costs most of the delta rule grows with its square


class _Plain(nn.Module):
    """y = w x / rms(x), with x / rms(x) rounded to the dtype of x before it is multiplied."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        if not _learns_through(self.weight, hidden_states):
            return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
        return _Normed.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore


class _ZeroCentred(nn.Module):
    """y = (1 + w) x / rms(x), in fp32."""

    weight: Tensor
    eps: float

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        if not _learns_through(self.weight, x):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        return _Normed.apply(x, 1 + self.weight.float(), self.eps)  # type: ignore


def _learns_through(weight: Tensor, x: Tensor) -> bool:
    """Whether x has a gradient and the weight has none, both of one dtype that is known here."""
    return (
        torch.is_grad_enabled()
        and x.requires_grad
        and not weight.requires_grad
        and x.dtype == weight.dtype
        and x.dtype in DTYPES
    )


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


QUICK: dict[type[nn.Module], type[nn.Module]] = {Qwen3_5GatedDeltaNet: QuickDeltaNet} | {
    layer: type(f"Quick{layer.__name__}", (forward, layer), {})
    for layer, forward in {
        LlamaMLP: _SwiGLU,
        Qwen2MLP: _SwiGLU,
        Qwen3MLP: _SwiGLU,
        Qwen3_5MLP: _SwiGLU,
        LlamaRMSNorm: _Plain,
        Qwen2RMSNorm: _Plain,
        Qwen3RMSNorm: _Plain,
        Qwen3_5RMSNorm: _ZeroCentred,
    }.items()
}
"""The library's class -> ours, which falls back to it."""


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
    """w x / rms(x), rms(x) = sqrt(mean(x^2) + eps), and its gradient in x.

        dx = g / rms - x <g, x> / (d rms^3),   g = w dy

    Autograd of the formula keeps three tensors as large as x in fp32 and makes a dozen.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "*n d"], weight: Float[Tensor, " d"], eps: float
    ) -> Float[Tensor, "*n d"]:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "*n d"]) -> tuple[Float[Tensor, "*n d"], None, None]:
        x, weight, scale = ctx.saved_tensors
        wide, g = x.float(), dy.float() * weight
        along = (g * wide).sum(-1, keepdim=True).mul_(scale.pow(3)).div_(-x.shape[-1])
        return g.mul_(scale).addcmul_(wide, along).to(x.dtype), None, None
