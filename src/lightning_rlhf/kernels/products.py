"""Choice of the faster library for matrix products, MKL or oneDNN."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

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
