"""SDPA attention with a fast gradient in 16 bits on a CPU, and rotary embeddings."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from lightning_rlhf.kernels.layers import own_class

SDPA, FAST_SDPA = "sdpa", "fast_sdpa"
SHORT = 4
"""Sequence length over head size up to which the attention probabilities take less memory than
queries, keys, values and output in fp32."""
SCORES = 2**24  # in fp32: 64 MB a tensor, of which two are alive
sdpa_attention_forward = AttentionInterface()[SDPA]


def use_fast_sdpa(model: PreTrainedModel, *, fast: bool) -> None:
    """Make a model that uses SDPA attention use `fast_sdpa`, or undo that."""
    before, after = (SDPA, FAST_SDPA) if fast else (FAST_SDPA, SDPA)
    if model.config._attn_implementation == before:
        model.set_attn_implementation(after)


def fast_sdpa(
    module: nn.Module,
    query: Float[Tensor, "B H S d"],
    key: Float[Tensor, "B K L d"],
    value: Float[Tensor, "B K L d"],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B S H d"], None]:
    """Compute SDPA attention as the library does, but with a fast gradient in 16 bits on a CPU.

    There torch's own gradient takes about seven times as long as in fp32. Causal attention of short
    sequences in bf16 keeps its probabilities for a gradient by matrix products; the rest is
    computed in fp32 by the library, and the output is rounded.
    """
    learns = torch.is_grad_enabled() and query.requires_grad
    if not (_is_slow(query) and learns):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale, causal = kwargs.get("scaling"), kwargs.get("is_causal")
    batch, heads, length, size = query.shape
    with torch.autocast("cpu", enabled=False):
        if (
            query.dtype == torch.bfloat16
            and length <= SHORT * size
            and batch * heads * length**2 <= SCORES
            and attention_mask is None
            and (getattr(module, "is_causal", True) if causal is None else causal)
            and length == key.shape[2]
            and key.shape == value.shape
            and not kwargs.get("dropout")
            and all(kwargs.get(name) is None for name in ("position_bias", "softcap", "cache"))
        ):
            scale = size**-0.5 if scale is None else scale
            mixed: Tensor = _CausalAttention.apply(query, key, value, scale)  # type: ignore
            return mixed.transpose(1, 2), None
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
        wide = [x.float() for x in (query, key, value)]
        output, _ = sdpa_attention_forward(module, *wide, attention_mask, **kwargs)
    return output.to(query.dtype), None


def _is_slow(query: Tensor) -> bool:
    """Return whether torch's gradient of attention is several times slower than in fp32."""
    return query.device.type == "cpu" and query.dtype.itemsize == 2


class _CausalAttention(torch.autograd.Function):
    """P V, P = softmax(scale Q K^T) under a causal mask: scores in fp32, P kept in 16 bits.

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
    """Return one matrix for each key head: its positions, or those of all its query heads."""
    return x.reshape(keys[0] * keys[1], -1, x.shape[-1])


def is_gated(layer: nn.Module) -> bool:
    """Return whether an attention layer also projects a gate for each query."""
    return own_class(layer).__name__ == "Qwen3_5Attention"


def apply_rotary(
    x: Float[Tensor, "N H s"], cos: Float[Tensor, "N 1 r"], sin: Float[Tensor, "N 1 r"]
) -> Float[Tensor, "N H s"]:
    """Apply rotary position embeddings to the first r dimensions of each head.

        y = x cos + [-x_2, x_1] sin,   x = [x_1, x_2] in halves

    sin: as `signed_sin` returns it.
    Source: Su et al. 2021, eq. 34, https://arxiv.org/abs/2104.09864
    """
    r = cos.shape[-1]
    rotated = x[..., :r]
    swapped = torch.cat(rotated.chunk(2, dim=-1)[::-1], dim=-1)
    y = (rotated * cos).addcmul_(swapped, sin)
    return y if r == x.shape[-1] else torch.cat([y, x[..., r:]], dim=-1)


def signed_sin(sin: Float[Tensor, "*N r"]) -> Float[Tensor, "*N r"]:
    """Return sin with its first half negated."""
    first, second = sin.chunk(2, dim=-1)
    return torch.cat([-first, second], dim=-1)


AttentionInterface.register(FAST_SDPA, fast_sdpa)
AttentionMaskInterface.register(FAST_SDPA, AttentionMaskInterface()[SDPA])
