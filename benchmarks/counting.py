"""Counters of tensor sizes and matrix products, based on torch's dispatch modes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_rlhf.kernels import layers
from lightning_rlhf.kernels.lora import ROWS

PRODUCTS = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.addmm_.default: 1,
    torch.ops.aten.baddbmm.default: 1,
}
"""Matrix product operator -> index of its argument that is the first factor."""
PACKED = torch.ops.mkldnn._linear_pointwise.default
"""oneDNN's linear operator, for plain weights and for the packed weights of a rollout."""
Factor = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Size and stride of a tensor; the stride is None for a packed weight."""


class Memory(TorchDispatchMode):
    """A counter of the bytes of new tensors: the largest tensor, and the peak of live bytes.

    Views of existing tensors do not count; temporary memory that an operation frees before it
    returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.largest_shape: tuple[int, ...] = ()
        self.alive = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = func(*args, **kwargs)
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and storage_of(x) not in given | self._known:
                self._see(x)
        return found

    def _see(self, x: Tensor) -> None:
        storage, number = x if x.is_mkldnn else x.untyped_storage(), storage_of(x)
        size = x.numel() * x.element_size() if x.is_mkldnn else x.untyped_storage().nbytes()
        if size > self.largest:
            self.largest, self.largest_shape = size, tuple(x.shape)
        self._known.add(number)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, number, size)

    def _forget(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.alive -= size


def storage_of(x: Tensor) -> int:
    """Return an identifier of the tensor's storage, equal for tensors that share their memory."""
    return int(x._cdata if x.is_mkldnn else x.untyped_storage()._cdata)


class Products(TorchDispatchMode):
    """A counter of matrix products by operator, sizes and strides of the factors, and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[Any, Factor, Factor, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            a, b = args[PRODUCTS[func] : PRODUCTS[func] + 2]
            product = torch.mm if a.ndim == 2 else torch.bmm
            self.counts[product, factor(a), factor(b), a.dtype] += 1
        elif func is PACKED:
            self.counts[packed_product, factor(args[0]), factor(args[1]), args[0].dtype] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def flop_counter() -> Iterator[FlopCounterMode]:
    """Yield torch's counter of floating-point operations, extended by in-place `addmm_` and by
    oneDNN's operator for packed weights.

    Inside the block, fp32 products use torch's own operators, which the counter knows, and numbers
    of rows are not rounded up for oneDNN.
    """

    def added(_: Any, a: tuple[int, int], b: tuple[int, int], **kwargs: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    def packed(x: tuple[int, ...], *args: Any, out_shape: tuple[int, ...], **kwargs: Any) -> int:
        return 2 * prod(x) * out_shape[-1]

    def none(*args: Any, **kwargs: Any) -> int:
        return 0  # torch takes the gradient of a depthwise convolution for that of a full one

    custom = {torch.ops.aten.addmm_: added, PACKED.overloadpacket: packed,
              torch.ops.aten.convolution_backward: none}  # fmt: skip
    counter = FlopCounterMode(display=False, custom_mapping=custom)
    with patch.object(layers, "fp32_by_onednn", bool), counter:
        yield counter


def factor(x: Tensor) -> Factor:
    return tuple(x.shape), None if x.is_mkldnn else x.stride()


def random_factor(factor: Factor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a random tensor with the size and stride of `factor`, packed where it is packed."""
    size, stride = factor
    if stride is None:
        weight = torch.randn(size, dtype=dtype)
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)  # type: ignore
    return torch.empty_strided(size, stride, dtype=dtype, device=device).normal_()


def packed_product(x: Tensor, weight: Tensor) -> Tensor:
    return PACKED(x, weight, None, "none", [], "")  # type: ignore
