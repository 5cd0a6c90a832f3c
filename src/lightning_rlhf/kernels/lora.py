"""LoRA layers with fewer passes over the activations than PEFT's.

Linear layers of one input are one product, for a few rows and many calls.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from peft.tuners.lora import Linear as LoRALinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_rlhf.kernels.layers import FastLayer, by_onednn, computing_dtype, linear, product

MERGE_FROM = 2  # ratio of operations saved to those of adding an adapter to W, from which to merge


def is_plain_lora(layer: LoRALinear) -> bool:
    """Return whether the layer is W + sum of scale * B A, without DoRA, variants or LoRA bias."""
    return not layer.merged and not any(
        layer.use_dora.get(adapter) or layer.lora_bias.get(adapter) or adapter in layer.lora_variant
        for adapter in layer.active_adapters
    )


class FusedLoRALinear(FastLayer, LoRALinear):
    """PEFT's linear layer with its active adapters added in place, or to the weight.

        y = x W^T + b + sum_i scale_i (x A_i^T) B_i^T

    It equals PEFT's result up to rounding; autograd of the formula makes a tensor as large as y
    for every product, sum and scale of it. W is frozen, and W and adapters are in the dtype of the
    computation, or rounded to it by autocast; everything else is computed by PEFT.

    In fp32 many tokens are multiplied with the sum of the matrices: two products less, for memory
    of one more W until the gradient is taken. 16 bits would round the adapter away.
    """

    def forward(self, x: Float[Tensor, "*n i"], *args: Any, **kwargs: Any) -> Float[Tensor, "*n o"]:
        base = self.base_layer
        autocast, dtype = torch.is_autocast_enabled(x.device.type), computing_dtype(x)
        adapters = [a for a in self.active_adapters if a in self.lora_A]
        pairs = [(self.lora_A[adapter].weight, self.lora_B[adapter].weight) for adapter in adapters]
        drops = self.training and any(type(self.lora_dropout[a]) is nn.Dropout for a in adapters)
        if (
            args
            or kwargs
            or self.disable_adapters
            or base.weight.dtype != dtype
            or base.weight.requires_grad
            or (base.bias is not None and base.bias.requires_grad)
            or not (autocast or all(a.dtype == dtype for a, _ in pairs))
            or not is_plain_lora(self)
            or drops
        ):
            return super().forward(x, *args, **kwargs)
        matrices = [matrix.to(dtype) for pair in pairs for matrix in pair]
        scales = [self.scaling[adapter] for adapter in adapters]
        # Adding an adapter to W takes far fewer operations than to each of many tokens.
        inputs, outputs = self.in_features, self.out_features
        merges = x.numel() // inputs * (inputs + outputs) > MERGE_FROM * inputs * outputs
        merges = merges and dtype == torch.float32
        return _LoRA.apply(x.to(dtype), base.weight, base.bias, merges, scales, *matrices)  # type: ignore


class _LoRA(torch.autograd.Function):
    """x (W + sum_i scale_i B_i A_i)^T + b, and the gradients of x, A_i and B_i.

    Where `merges` is False it is x W^T + b + sum_i scale_i (x A_i^T) B_i^T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "*n i"],
        weight: Float[Tensor, "o i"],
        bias: Float[Tensor, " o"] | None,
        merges: bool,
        scales: Sequence[float],
        *matrices: Tensor,
    ) -> Float[Tensor, "*n o"]:
        rows, inner = x.reshape(-1, x.shape[-1]), []
        pairs = zip(matrices[::2], matrices[1::2], scales, strict=True)
        if merges:
            for a, b, scale in pairs:
                weight = torch.addmm(weight, b, a, alpha=scale)
            y = linear(rows, weight, bias)
        else:
            y = linear(rows, weight, bias)
            for a, b, scale in pairs:
                inner.append(rows @ a.T)
                y.addmm_(inner[-1], b.T, alpha=scale)
        ctx.merges, ctx.scales, ctx.shape = merges, scales, x.shape
        ctx.save_for_backward(rows, weight, *matrices, *inner)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Float[Tensor, "*n o"]) -> tuple[Tensor | None, ...]:
        count = len(ctx.scales)
        rows, weight, *others = ctx.saved_tensors
        matrices, inner = others[: 2 * count], others[2 * count :]
        dy = dy.reshape(-1, dy.shape[-1])
        wanted_x, *_ = ctx.needs_input_grad
        wanted = ctx.needs_input_grad[5:]
        dx = product(dy, weight) if wanted_x else None
        gradients: list[Tensor | None] = []
        for i, scale in enumerate(ctx.scales):
            a, b = matrices[2 * i : 2 * i + 2]
            da = db = None
            if ctx.merges:
                if wanted[2 * i]:
                    da = product(product(dy, b).mul_(scale).T, rows)
                if wanted[2 * i + 1]:
                    db = product(dy.T, product(rows, a.T).mul_(scale))
            else:
                d_inner = (dy @ b).mul_(scale)
                if dx is not None:
                    dx.addmm_(d_inner, a)
                if wanted[2 * i]:
                    da = d_inner.T @ rows
                if wanted[2 * i + 1]:
                    db = (dy.T @ inner[i]).mul_(scale)
            gradients += [da, db]
        return None if dx is None else dx.view(ctx.shape), None, None, None, None, *gradients


ROWS = 32  # number of rows for which a packed weight is laid out; others are correct too
SMALLEST, LARGEST = 2**17, 2**25
"""Elements of a weight from which packing helps in fp32, and above which its copy is too large."""
LARGEST_BF16 = 2**28
"""The same in bf16: 0.5 GB once more for half the time of 8 rows is worth it from 10 tokens."""


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
        inward, outward = zip(*(_adapters(layer, dtype) for layer in layers), strict=True)
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
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight.numel() <= LARGEST_BF16
    return weight.dtype == torch.float32 and SMALLEST <= weight.numel() <= LARGEST


def _adapters(layer: nn.Linear | LoRALinear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return all A_i of a layer, [r, i], and all scale_i B_i, [o, r]; r is 0 where it has none."""
    inward = [layer.weight.new_zeros(0, layer.in_features, dtype=dtype)]
    outward = [layer.weight.new_zeros(layer.out_features, 0, dtype=dtype)]
    if isinstance(layer, LoRALinear):
        for name in layer.active_adapters:
            if name in layer.lora_A:
                a, b = (x.get_submodule(name).weight for x in (layer.lora_A, layer.lora_B))
                inward.append(a.to(dtype))
                outward.append((layer.scaling[name] * b).to(dtype))
    return torch.cat(inward), torch.cat(outward, dim=1)
