"""Faster layers: norms, fp32 products, linear attention in short chunks, SDPA attention, rotations.

Products are computed by the faster of MKL and oneDNN, the gradient of attention fast in 16 bits.
"""

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_CHUNK = 40  # tokens; the main cost of the delta rule grows with its square
LIBRARY = "transformers.models."
GATED = "Qwen3_5Attention"
"""Name of the attention class that also projects a gate for each query."""
ROWS = 64  # multiple of the rows of activations; half of it makes twice as many shapes
WORTH, FEWEST = 2**23, 4
"""Fewest multiplications, and fewest rows and columns of a matrix, of a product for oneDNN: smaller
ones save too little for what it keeps of each shape."""


@cache
def fp32_by_onednn() -> bool:
    """Return whether oneDNN multiplies in fp32 faster than torch's default on this CPU.

    On AMD's processors MKL uses vectors of 256 bits; with AVX-512 oneDNN takes half the time.
    """
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return (
        torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AMD" in found.get("cpu_name", "")
    )


def by_onednn(x: Float[Tensor, "*n k"], others: int = WORTH) -> bool:
    """Return whether a product of x and a matrix of so many rows (columns) goes to oneDNN."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * others >= WORTH
        and min(x.shape[-1], x[..., 0].numel(), others) >= FEWEST
        and fp32_by_onednn()
    )


def linear(
    x: Float[Tensor, "n i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None = None
) -> Float[Tensor, "n o"]:
    """Return x W^T + b, outside autograd."""
    if by_onednn(x, len(weight)):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)


def product(a: Float[Tensor, "n k"], b: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    """Return a b, outside autograd."""
    if not by_onednn(a, b.shape[1]):
        return a @ b
    if a.is_contiguous() or len(a) <= b.shape[1]:
        return linear(a, b.T)
    return linear(b.T, a).T  # of the two, oneDNN is handed a copy of the first


def computing_dtype(x: Tensor | PreTrainedModel) -> torch.dtype:
    """Return the dtype of matrix products with x: that of autocast on its device where it is on.

    On torch's device `meta`, which has no autocast, it is that of the CPU.
    """
    device = x.device.type
    device = "cpu" if device == "meta" else device
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def compiles_by_shape(x: Tensor) -> bool:
    """Return whether oneDNN computes products with x, which it compiles for each shape.

    A new shape takes 0.4 to 1 ms and 0.6 to 0.75 MB, of which `runs/accelerator.py` limits the sum.
    """
    if x.device.type != "cpu":
        return False
    dtype = computing_dtype(x)
    return dtype.itemsize == 2 or (dtype == torch.float32 and fp32_by_onednn())


def rounded_up(count: int, multiple: int) -> int:
    """Return the smallest multiple that is not below the count."""
    return -(-count // multiple) * multiple


class FastLayer:
    """A layer whose class replaces its last base class, to which it falls back."""


def own_class(layer: nn.Module) -> type[nn.Module]:
    """Return the class of a layer without the one that torch's `fully_shard` derives from it."""
    kind = type(layer)
    return kind.__bases__[-1] if issubclass(kind, FSDPModule) else kind


def library_class(layer: nn.Module) -> type[nn.Module]:
    """Return the class that the library gave to a layer."""
    kind = own_class(layer)
    return kind.__bases__[-1] if issubclass(kind, FastLayer) else kind


class FusedRMSNorm(FastLayer, nn.Module):
    """y = w x / rms(x), in fp32 and rounded once; most of the library's round x / rms(x) too."""

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        if x.dtype not in DTYPES or x.dtype != self.get_parameter("weight").dtype:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        weight, eps = weight_and_eps(self)
        return _RMSNormFunction.apply(x, weight.float(), eps)  # type: ignore


def weight_and_eps(norm: Any) -> tuple[Float[Tensor, " d"], float]:
    """Return w and eps of a norm that has a fast class; Qwen3.5's parameter is w - 1."""
    if library_class(norm).__name__ == "Qwen3_5RMSNorm":
        return 1 + norm.weight.float(), norm.eps
    return norm.weight, norm.variance_epsilon


class ChunkedDeltaNet(FastLayer, nn.Module):
    """Linear attention in chunks of equal length, on a CPU.

    The library pads every sequence to a multiple of 64 tokens.
    """

    def forward(self, hidden_states: Float[Tensor, "B S d"], *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output, [B, S, d]."""
        if hidden_states.device.type == "cpu":
            length = hidden_states.shape[1]
            kwargs["chunk_size"] = -(-length // -(-length // MAX_CHUNK))
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc, no-any-return]


class OneDNNLinear(FastLayer, nn.Linear):
    """A linear layer that uses oneDNN for fp32 products where that is faster."""

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        if (
            x.dtype != self.weight.dtype
            or x.shape[-1] != self.in_features
            or torch.is_autocast_enabled("cpu")
            or not by_onednn(x, self.out_features)
        ):
            return super().forward(x)
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = _LinearFunction.apply(rows, self.weight, self.bias)  # type: ignore
        return y.view(*x.shape[:-1], len(self.weight))


LINEAR = nn.Linear, OneDNNLinear
"""Classes that compute W x + b and nothing else."""
NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3_5RMSNorm")
MIXINS: dict[str, type[FastLayer]] = {
    **dict.fromkeys(NORMS, FusedRMSNorm),
    "Qwen3_5GatedDeltaNet": ChunkedDeltaNet,
}
"""Name of a class of transformers -> class before it in the bases of its fast class."""


@cache
def fast_class(layer: type) -> type[nn.Module] | None:
    """Return the fast class of a layer's class, None where there is none."""
    if layer is nn.Linear:
        return OneDNNLinear
    mixin = MIXINS.get(layer.__name__) if layer.__module__.startswith(LIBRARY) else None
    return mixin and type(f"Fast{layer.__name__}", (mixin, layer), {})


class _LinearFunction(torch.autograd.Function):
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


class _RMSNormFunction(torch.autograd.Function):
    """w x / rms(x), rms(x) = sqrt(mean(x^2) + eps), and its gradient.

        dx = g / rms - x <g, x> / (d rms^3),   g = w dy,   dw = sum of dy x / rms

    Autograd of the formula keeps three tensors as large as x in fp32 and makes a dozen.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "*n d"], weight: Float[Tensor, " d"], eps: float
    ) -> Float[Tensor, "*n d"]:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "*n d"]) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        wide, dy = x.float(), dy.float()
        dw = (dy * wide).mul_(scale).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        g = dy * weight
        along = (g * wide).sum(-1, keepdim=True).mul_(scale.pow(3)).div_(-x.shape[-1])
        return g.mul_(scale).addcmul_(wide, along).to(x.dtype), dw, None


SDPA, FAST_SDPA = "sdpa", "fast_sdpa"
SHORT = 4
"""Sequence length over head size up to which it saves memory to keep attention probabilities."""
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
    is_slow = query.device.type == "cpu" and query.dtype.itemsize == 2
    if not (is_slow and torch.is_grad_enabled() and query.requires_grad):
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
