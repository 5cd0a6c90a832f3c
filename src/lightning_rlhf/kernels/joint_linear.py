"""Linear layers of one input as one product, for a few rows and many calls."""

from __future__ import annotations

import torch
from jaxtyping import Float
from peft.tuners.lora import Linear as LoRALinear
from torch import Tensor, nn

from lightning_rlhf.kernels.products import by_onednn, linear

ROWS = 32  # number of rows for which a packed weight is laid out; others are correct too
SMALLEST, LARGEST = 2**17, 2**25
"""Number of elements of a weight from which packing saves time in fp32, and above which its copy
takes too much memory."""
LARGEST_BF16 = 2**28
"""The same in bf16. An output layer of 2**28 elements takes 0.5 GB once more, and is computed for 8
rows in half the time, which pays for packing it from 10 tokens on."""
OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
"""Operators of torch.ops.mkldnn by which torch.compile packs weights; a release may lack them."""


class JointLinear:
    """W x + sum_i scale_i B_i A_i x + b, of one linear layer or several with the same input.

    It is computed as [W, scale_i B_i] [x, A_i x] + b. Memory: a copy of W where there are adapters,
    several layers, a CPU or another data type.
    """

    def __init__(self, *layers: nn.Linear | LoRALinear, dtype: torch.dtype | None = None) -> None:
        """Make the product in `dtype`; None is that of the weights."""
        bases = [layer.base_layer if isinstance(layer, LoRALinear) else layer for layer in layers]
        dtype = dtype or bases[0].weight.dtype
        biases = [base.bias.to(dtype) for base in bases if base.bias is not None]
        weights = [base.weight.to(dtype) for base in bases]
        weight = torch.cat(weights) if len(bases) > 1 else weights[0]
        pairs = [_adapters(*pair, dtype) for pair in zip(layers, bases, strict=True)]
        inward, outward = zip(*pairs, strict=True)
        joint = torch.cat(inward)
        self.inward = _Weight(joint, None) if len(joint) else None
        if self.inward is not None:
            weight = torch.cat([weight, torch.block_diag(*outward)], dim=1)
        self.weight = _Weight(weight, torch.cat(biases) if biases else None)

    def __call__(
        self, x: Float[Tensor, "B i"], onto: Float[Tensor, "B o"] | None = None
    ) -> Float[Tensor, "B o"]:
        """Return the product, added to `onto` where it is given, in the dtype of `onto`."""
        x = x.to(self.weight.dtype)
        if self.inward is not None:
            x = torch.cat([x, self.inward(x)], dim=1)
        return self.weight(x, onto)


class _Weight:
    """W x + b with W laid out as the processor reads it fastest."""

    def __init__(self, weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None) -> None:
        self.bias, self.dtype = bias, weight.dtype
        self.packed = can_be_packed(weight)
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        else:  # column by column: a sixth faster on a CPU
            self.weight = weight.T.contiguous().T if weight.numel() < SMALLEST else weight

    def __call__(
        self, x: Float[Tensor, "B i"], onto: Float[Tensor, "B o"] | None = None
    ) -> Float[Tensor, "B o"]:
        if self.packed:
            y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        elif onto is None or onto.dtype != x.dtype or by_onednn(x, len(self.weight)):
            y = linear(x, self.weight, self.bias)
        else:
            y = torch.addmm(onto, x, self.weight.T)
            return y if self.bias is None else y.add_(self.bias)
        if onto is None:
            return y
        return y.add_(onto) if y.dtype == onto.dtype else y + onto


def can_be_packed(weight: Float[Tensor, "o i"]) -> bool:
    """Return whether oneDNN has a packed layout for the weight that saves time.

    A product of 1 to 64 rows is then 1.2 to 2 times as fast as with the plain layout, for which a
    CPU uses a library that packs it at every call. bf16 uses oneDNN with either layout.
    """
    onednn = torch.ops.mkldnn
    if weight.device.type != "cpu" or not all(hasattr(onednn, name) for name in OPERATORS):
        return False
    if weight.dtype == torch.bfloat16 and onednn._is_mkldnn_bf16_supported():
        return weight.numel() <= LARGEST_BF16
    return weight.dtype == torch.float32 and SMALLEST <= weight.numel() <= LARGEST


def _adapters(
    layer: nn.Linear | LoRALinear, base: nn.Linear, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return all A_i of a layer, [r, i], and all scale_i B_i, [o, r]; r is 0 where it has none."""
    inward = [base.weight.new_zeros(0, base.in_features, dtype=dtype)]
    outward = [base.weight.new_zeros(base.out_features, 0, dtype=dtype)]
    if isinstance(layer, LoRALinear):
        for name in layer.active_adapters:
            if name in layer.lora_A:
                a, b = (x.get_submodule(name).weight for x in (layer.lora_A, layer.lora_B))
                inward.append(a.to(dtype))
                outward.append((layer.scaling[name] * b).to(dtype))
    return torch.cat(inward), torch.cat(outward, dim=1)
