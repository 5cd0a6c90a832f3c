"""Layers of transformers that take fewer passes over the activations, or shorter ones."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5RMSNorm

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
    norm: type(f"Quick{norm.__name__}", (forward, norm), {})
    for norm, forward in {
        LlamaRMSNorm: _Plain,
        Qwen2RMSNorm: _Plain,
        Qwen3RMSNorm: _Plain,
        Qwen3_5RMSNorm: _ZeroCentred,
    }.items()
}
"""The library's class -> ours, which falls back to it."""


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
