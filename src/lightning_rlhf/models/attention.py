"""The library's SDPA attention; in 16 bits on a CPU its gradient by products, or in fp32."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightning_rlhf.models.layers import (
    gain_gradient,
    inverse_rms,
    is_known_norm,
    through_rms,
    weight_and_eps,
)

WIDE_SDPA = "wide_sdpa"
SHORT = 4
"""Times the size of a head. Up to this length, what each position looks at takes less memory than
queries, keys, values and what is said in fp32."""
SCORES = 2**24  # in fp32: 64 MB a tensor, of which two are alive


def attend_widely(model: PreTrainedModel) -> None:
    """Let a model that attends by SDPA do so by `wide_sdpa`."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(WIDE_SDPA)


def wide_sdpa(
    module: nn.Module,
    query: Float[Tensor, "B H S d"],
    key: Float[Tensor, "B K L d"],
    value: Float[Tensor, "B K L d"],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B S H d"], None]:
    """As the library computes it; in 16 bits on a CPU with a gradient, as `attend` does.

    With a mask: in fp32, and rounded.
    """
    learns = torch.is_grad_enabled() and query.requires_grad
    if not (_is_slow(query) and learns):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale, causal = kwargs.get("scaling"), kwargs.get("is_causal")
    if (
        attention_mask is None
        and (getattr(module, "is_causal", True) if causal is None else causal)
        and query.shape[2] == key.shape[2]
        and key.shape == value.shape
        and not kwargs.get("dropout")
        and all(kwargs.get(name) is None for name in ("position_bias", "softcap", "cache"))
    ):
        return attend(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale), None
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    with torch.autocast("cpu", enabled=False):
        wide = [x.float() for x in (query, key, value)]
        output, _ = sdpa_attention_forward(module, *wide, attention_mask, **kwargs)
    return output.to(query.dtype), None


def _is_slow(query: Tensor) -> bool:
    """Whether the gradient of torch's own attention takes several times as long as in fp32."""
    return query.device.type == "cpu" and query.dtype.itemsize == 2


def attend(
    query: Float[Tensor, "B H S d"],
    key: Float[Tensor, "B K S d"],
    value: Float[Tensor, "B K S d"],
    scale: float,
) -> Float[Tensor, "B S H d"]:
    """Causal attention, to be learned through.

    In 16 bits on a CPU the gradient of torch's own takes about seven times as long as in fp32.
    There, rows that are short keep what each position looks at; others are computed in fp32 and
    rounded.
    """
    batch, heads, length, size = query.shape
    slow, dtype, groups = _is_slow(query), query.dtype, heads // key.shape[1]
    short = length <= SHORT * size and batch * heads * length**2 <= SCORES
    with torch.autocast(query.device.type, enabled=False):
        if slow and short and dtype == torch.bfloat16:
            mixed: Tensor = _Causal.apply(query, key, value, scale)  # type: ignore
            return mixed.transpose(1, 2)
        if slow:
            query, key, value = (x.float() for x in (query, key, value))
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return mixed.to(dtype).transpose(1, 2)


class _Causal(torch.autograd.Function):
    """P V, P = softmax(scale Q K^T) of what is not ahead: scores in fp32, P kept in 16 bits.

    dV = P^T dO,   dP = dO V^T,   dS = P * (dP - sum P * dP),   dQ = scale dS K,   dK = scale dS^T Q
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "B H S d"],
        key: Float[Tensor, "B K S d"],
        value: Float[Tensor, "B K S d"],
        scale: float,
    ) -> Float[Tensor, "B H S d"]:
        length = query.shape[2]
        ahead = query.new_full((length, length), -torch.inf, dtype=torch.float32).triu(1)
        ahead = ahead.repeat(query.shape[1] // key.shape[1], 1)
        q, k, v = (_by_key_head(x, key.shape) for x in (query, key, value))
        scores = torch.baddbmm(ahead, q.float(), k.float().transpose(1, 2), alpha=scale)
        p = scores.softmax(-1).to(q.dtype)
        ctx.save_for_backward(q, k, v, p)
        ctx.shapes, ctx.scale = (query.shape, key.shape), scale
        return torch.bmm(p, v).view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "B H S d"]) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        of_query, of_key = ctx.shapes
        dy = _by_key_head(dy, of_key)
        dp = torch.bmm(dy, v.transpose(1, 2))
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
        dq = torch.bmm(ds, k).mul_(ctx.scale)
        dk = torch.bmm(ds.transpose(1, 2), q).mul_(ctx.scale)
        dv = torch.bmm(p.transpose(1, 2), dy)
        return dq.view(of_query), dk.view(of_key), dv.view(of_key), None


def _by_key_head(x: Float[Tensor, "B H S d"], keys: torch.Size) -> Float[Tensor, "BK n d"]:
    """For each key head its own positions, or those of all its query heads."""
    return x.reshape(keys[0] * keys[1], -1, x.shape[-1])


def turned(
    x: Float[Tensor, "N H s"],
    cos: Float[Tensor, "N 1 r"],
    sin: Float[Tensor, "N 1 r"],
    norm: nn.Module | None = None,
) -> Float[Tensor, "N H s"]:
    """Rotary position embedding of the first r dimensions, behind a norm where there is one.

        y = x cos + [-x_2, x_1] sin,   x = [x_1, x_2] in halves

    sin: `signed`.
    Source: Su et al. 2021, eq. 34, https://arxiv.org/abs/2104.09864
    """
    if norm is None:
        return _Turned.apply(x, cos, sin)  # type: ignore
    if not is_known_norm(norm, x):
        return turned(norm(x), cos, sin)
    return _TurnedNorm.apply(x, *weight_and_eps(norm), cos, sin)  # type: ignore


class _Turned(torch.autograd.Function):
    """`turned`; autograd's own gradient is the same in twice as many passes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "N H s"],
        cos: Float[Tensor, "N 1 r"],
        sin: Float[Tensor, "N 1 r"],
    ) -> Float[Tensor, "N H s"]:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "N H s"]) -> tuple[Float[Tensor, "N H s"], None, None]:
        return _turn_back(dy, *ctx.saved_tensors), None, None


class _TurnedNorm(torch.autograd.Function):
    """`turned` of w x / rms(x), in fp32, and rounded once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "N H s"],
        weight: Float[Tensor, " s"],
        eps: float,
        cos: Float[Tensor, "N 1 r"],
        sin: Float[Tensor, "N 1 r"],
    ) -> Float[Tensor, "N H s"]:
        wide, cos, sin = x.float(), cos.float(), sin.float()
        scale = inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, scale, cos, sin)
        return _turn((wide * scale).mul_(weight), cos, sin).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Float[Tensor, "N H s"]
    ) -> tuple[Float[Tensor, "N H s"], Float[Tensor, " s"] | None, None, None, None]:
        x, weight, scale, cos, sin = ctx.saved_tensors
        wide, g = x.float(), _turn_back(dy.float(), cos, sin)
        dw = gain_gradient(g, wide, scale) if ctx.needs_input_grad[1] else None
        dx = through_rms(g.mul_(weight), wide, scale).to(x.dtype)
        return dx, dw, None, None, None


def _turn(
    x: Float[Tensor, "N H s"], cos: Float[Tensor, "N 1 r"], sin: Float[Tensor, "N 1 r"]
) -> Float[Tensor, "N H s"]:
    r = cos.shape[-1]
    part = x[..., :r]
    y = (part * cos).addcmul_(_halves_swapped(part), sin)
    return y if r == x.shape[-1] else torch.cat([y, x[..., r:]], dim=-1)


def _turn_back(
    dy: Float[Tensor, "N H s"], cos: Float[Tensor, "N 1 r"], sin: Float[Tensor, "N 1 r"]
) -> Float[Tensor, "N H s"]:
    r = cos.shape[-1]
    part = dy[..., :r]
    dx = (part * cos).add_(_halves_swapped(part * sin))
    return dx if r == dy.shape[-1] else torch.cat([dx, dy[..., r:]], dim=-1)


def _halves_swapped(x: Float[Tensor, "*n r"]) -> Float[Tensor, "*n r"]:
    return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)


def signed(sin: Float[Tensor, "*N r"]) -> Float[Tensor, "*N r"]:
    """Its first half negated."""
    first, second = sin.chunk(2, dim=-1)
    return torch.cat([-first, second], dim=-1)


AttentionInterface.register(WIDE_SDPA, wide_sdpa)
AttentionMaskInterface.register(WIDE_SDPA, sdpa_mask)
