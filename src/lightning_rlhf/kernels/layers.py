"""Faster layers: an RMS norm of few passes, linear attention in short chunks, fp32 products.

Products are computed by the faster library of two, MKL or oneDNN.
"""

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import PreTrainedModel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_CHUNK = 40  # tokens; the main cost of the delta rule grows with its square
LIBRARY = "transformers.models."
ROWS = 64  # multiple of the rows of activations; half of it makes twice as many shapes
WORTH, FEWEST = 2**23, 4
"""Fewest multiplications, and fewest rows and columns of a matrix, of a product for oneDNN: smaller
ones save too little for what it keeps of each shape."""


@cache
def fp32_by_onednn() -> bool:
    """Return whether oneDNN multiplies in fp32 faster than torch's default on this CPU.

    torch calls MKL, which computes on AMD's processors with vectors of 256 bits; where they have
    AVX-512 oneDNN takes half the time.
    """
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return (
        torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AMD" in found.get("cpu_name", "")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # of this release; another may lack it
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

    It takes 0.4 to 1 ms for each shape that it has not met, and keeps what it compiled: 0.6 to 0.75
    MB a shape, of up to 1,024 shapes; in a run, of those of `runs/accelerator.py`.
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
        return _RMSNormFunction.apply(x, *weight_and_eps(self))  # type: ignore


def is_zero_centred(norm: nn.Module) -> bool:
    """Return whether the norm's parameter is w - 1, as in Qwen3.5."""
    return library_class(norm).__name__ == "Qwen3_5RMSNorm"


def weight_and_eps(norm: Any) -> tuple[Float[Tensor, " d"], float]:
    """Return w in fp32 and eps of a norm that has a fast class."""
    if is_zero_centred(norm):
        return 1 + norm.weight.float(), norm.eps
    return norm.weight.float(), norm.variance_epsilon


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
MIXINS: dict[str, type[FastLayer]] = {
    "LlamaRMSNorm": FusedRMSNorm,
    "Qwen2RMSNorm": FusedRMSNorm,
    "Qwen3RMSNorm": FusedRMSNorm,
    "Qwen3_5RMSNorm": FusedRMSNorm,
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
