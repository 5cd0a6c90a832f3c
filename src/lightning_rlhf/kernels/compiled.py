"""Decoder layers as functions of tensors, which torch.compile turns into a few operations.

Much of the time of a small model's update is spent between the matrix products. The functions read
no module, so that a program compiled for one layer and role serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rlhf.core.errors import ConfigError, first_line
from lightning_rlhf.kernels.attention import apply_rotary, causal_attention, is_gated
from lightning_rlhf.kernels.layers import LINEAR, own_class, weight_and_eps
from lightning_rlhf.kernels.lora import FusedLoRALinear, has_dropout, is_plain_lora
from lightning_rlhf.kernels.packing import Packing, gather_rows, scatter_rows
from lightning_rlhf.kernels.products import by_onednn

SILU = "SiLU", "SiLUActivation"
VARIANTS = 64
"""Largest number of compiled programs of one function, which is 8 by torch's default. The first,
the middle and the last layers have different programs, and so have one row and several, every
number of adapters, short and long rows in 16 bits, every size of a head, and a separate critic."""


class Norm(NamedTuple):
    """RMS norm: w x / sqrt(mean(x^2) + eps)."""

    weight: Float[Tensor, " d"]
    """Weight in fp32."""
    eps: float

    @classmethod
    def of(cls, norm: Any) -> Norm:
        return cls(*weight_and_eps(norm))


class Linear(NamedTuple):
    """Linear layer with adapters: x W^T + b + sum_i scale_i (x A_i^T) B_i^T."""

    weight: Float[Tensor, "o i"]
    bias: Float[Tensor, " o"] | None
    adapters: tuple[tuple[Tensor, Tensor, float], ...]
    """A_i [r, i], B_i [o, r] and scale_i."""


class SwiGLU(NamedTuple):
    """x + W_down (silu(W_gate n) * W_up n), n = norm(x)."""

    norm: Norm
    gate: Linear
    up: Linear
    down: Linear

    @classmethod
    def of(cls, norm: nn.Module, mlp: Any, x: Tensor) -> SwiGLU | None:
        """Return the layer's tensors, None where the layer computes something else."""
        layers = _linears(x, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        if layers is None or type(mlp.act_fn).__name__ not in SILU:
            return None
        return cls(Norm.of(norm), *layers)


class Attention(NamedTuple):
    """x + W_out attention(W_query n, W_key n, W_value n), n = norm(x)."""

    norm: Norm
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    head_norms: tuple[Norm, ...]
    """Norms of queries and of keys; empty where the layer has none."""
    size: int
    """Size of a head."""
    scale: float
    """Factor of the product of a query and a key."""
    gated: bool
    """True if a gate is projected for each query."""

    @classmethod
    def of(cls, norm: nn.Module, layer: Any, x: Tensor) -> Attention | None:
        """Return the layer's tensors, None where the layer computes something else."""
        layers = _linears(x, layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)
        if layers is None:
            return None
        norms = [Norm.of(getattr(layer, n)) for n in ("q_norm", "k_norm") if hasattr(layer, n)]
        gated = is_gated(layer)
        query, key, value, out = layers
        return cls(
            Norm.of(norm),
            query,
            key,
            value,
            out,
            tuple(norms),
            layer.head_dim,
            layer.scaling,
            gated,
        )


def _linears(x: Tensor, *layers: nn.Module) -> list[Linear] | None:
    """Return the tensors of linear layers, None where one does not compute in the dtype of x.

    Returns None too where the compiler would call a library that takes twice as long as oneDNN.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    if by_onednn(x) or (autocast and torch.get_autocast_dtype(device) != x.dtype):
        return None
    found = []
    base: Any
    for layer in layers:
        base, adapters = layer, []
        if isinstance(layer, FusedLoRALinear):
            if layer.disable_adapters or has_dropout(layer) or not is_plain_lora(layer):
                return None
            base = layer.base_layer
            for name in layer.active_adapters:
                if name in layer.lora_A:
                    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                    adapters.append((a, b, layer.scaling[name]))
        if own_class(base) not in LINEAR or base.weight.dtype != x.dtype:
            return None
        if not (autocast or all(a.dtype == x.dtype for a, _, _ in adapters)):
            return None
        found.append(Linear(base.weight, base.bias, tuple(adapters)))
    return found


class Head(nn.Module):
    """Sizes of an attention head, in a module, where they are constants to the compiler.

    For heads of a variable size it would generate loops over single numbers.
    """

    def __init__(self, size: int, rotated: int) -> None:
        """Store the size and the number of rotated dimensions of a head."""
        super().__init__()
        self.size, self.rotated = size, rotated


def decoder_layer(
    x: Float[Tensor, "N d"],
    attention: Attention,
    swiglu: SwiGLU,
    packing: Packing,
    tables: Sequence[tuple[Tensor, Tensor]],
    *,
    is_last: bool,
) -> Float[Tensor, "M d"]:
    """Compute a whole layer, compiled. tables: `Packing.rotary_tables` of keys and of queries."""
    real = packing.real
    if real is None:  # one program for both
        real = torch.arange(packing.rows * packing.columns, device=x.device)
    asked, asked_real = (packing.wanted, packing.wanted_real) if is_last else (real, None)
    indices = real, asked, asked_real, packing.rows, packing.columns
    head = Head(attention.size, tables[0][0].shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        return compiled(_decoder_layer)(x, attention, swiglu, head, *tables, *indices)


def feed_forward(x: Float[Tensor, "N d"], swiglu: SwiGLU) -> Float[Tensor, "N d"]:
    """Compute a layer's SwiGLU with its norm and residual, compiled."""
    with torch.autocast(x.device.type, enabled=False):
        return compiled(_feed_forward)(x, swiglu)


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function compiled for tensors of any length."""
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=True, fullgraph=True)


def check_compiler() -> None:
    """Raise ConfigError where torch has no compiler for this machine's devices."""
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        try:
            compiled(_twice)(torch.zeros(2, device=device))
        except Exception as error:  # from torch, the system's compiler or its files
            needed = "a C++ compiler (g++ or clang++)" if device == "cpu" else "Triton"
            raise ConfigError(
                f"model.compile=true, but nothing can be compiled for {device}: "
                f"{first_line(error)}; allowed: false, or {needed} that torch finds"
            ) from error


def _twice(x: Tensor) -> Tensor:
    return x + x


def _decoder_layer(
    x: Float[Tensor, "N d"],
    attention: Attention,
    swiglu: SwiGLU,
    head: Head,
    key_tables: tuple[Tensor, Tensor],
    query_tables: tuple[Tensor, Tensor],
    real: Int[Tensor, " N"],
    asked: Int[Tensor, " M"],
    asked_real: Int[Tensor, " M"] | None,
    rows: int,
    columns: int,
) -> Float[Tensor, "M d"]:
    """Compute a layer of packed positions.

    real, asked: indices among rows x columns of the N tokens, and of the M that attend to them.
    asked_real: indices of the M among the N; None: they are all.
    """
    asking = x if asked_real is None else gather_rows(x, asked_real)
    size = head.size
    n = _normed(x, attention.norm)
    m = n if asked_real is None else gather_rows(n, asked_real)
    query, key, value = (
        _projected(at, layer)
        for at, layer in ((m, attention.query), (n, attention.key), (n, attention.value))
    )
    gate = None
    if attention.gated:
        query, gate = query.unflatten(1, (-1, 2 * size)).chunk(2, dim=-1)
        query, gate = query.flatten(1), gate.flatten(1)
    query, key = (part.unflatten(1, (-1, size)) for part in (query, key))
    if attention.head_norms:
        query, key = map(_normed, (query, key), attention.head_norms)
    query, key = (
        apply_rotary(h, cos[..., : head.rotated], sin[..., : head.rotated]).flatten(1)
        for h, (cos, sin) in ((query, query_tables), (key, key_tables))
    )
    query, key, value = (
        scatter_rows(h, places, rows * columns).view(rows, columns, -1, size).transpose(1, 2)
        for h, places in ((query, asked), (key, real), (value, real))
    )
    mixed = causal_attention(query, key, value, attention.scale).reshape(rows * columns, -1)
    mixed = gather_rows(mixed, asked)
    mixed = mixed if gate is None else mixed * gate.sigmoid()
    return _feed_forward(asking + _projected(mixed, attention.out), swiglu)


def _feed_forward(x: Float[Tensor, "N d"], swiglu: SwiGLU) -> Float[Tensor, "N d"]:
    n = _normed(x, swiglu.norm)
    hidden = F.silu(_projected(n, swiglu.gate)) * _projected(n, swiglu.up)
    return x + _projected(hidden, swiglu.down)


def _projected(x: Float[Tensor, "N i"], layer: Linear) -> Float[Tensor, "N o"]:
    y = F.linear(x, layer.weight, layer.bias)
    for a, b, scale in layer.adapters:
        y = y + F.linear(F.linear(x, a.to(x.dtype)), (scale * b).to(x.dtype))
    return y


def _normed(x: Float[Tensor, "*N d"], norm: Norm) -> Float[Tensor, "*N d"]:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return (norm.weight * wide).to(x.dtype)
