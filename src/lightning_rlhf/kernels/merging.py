"""Temporary merging of adapters into the weights while nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.lora import Linear as LoRALinear
from torch import nn

from lightning_rlhf.kernels.layers import LINEAR, OneDNNLinear, own_class
from lightning_rlhf.kernels.lora import is_plain_lora


@contextmanager
def merged_adapters(model: nn.Module) -> Iterator[None]:
    """Replace every LoRA layer by one plain linear layer, W + sum of scale * B A, inside.

    That is one matrix product instead of three for each active adapter. The LoRA layers themselves
    are kept and restored, so that nothing is rounded twice. Layers that do not compute in fp32,
    where rounding would remove the adapter, are unchanged, as are quantised ones and variants.

    Memory: a second copy of the weights under LoRA.
    """
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, LoRALinear) and _can_merge(layer):
                    swapped.append((parent, name, layer))
                    setattr(parent, name, _plain(layer))
        yield
    finally:
        for parent, name, layer in swapped:
            setattr(parent, name, layer)


def _can_merge(layer: LoRALinear) -> bool:
    base = layer.base_layer
    return (
        own_class(base) in LINEAR
        and base.weight.dtype == torch.float32
        and not torch.is_autocast_enabled(base.weight.device.type)
        and is_plain_lora(layer)
    )


@torch.no_grad()
def _plain(layer: LoRALinear) -> nn.Linear:
    base = layer.base_layer
    weight = base.weight
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            weight = weight + layer.get_delta_weight(adapter)
    plain = OneDNNLinear(base.in_features, base.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = base.bias
    return plain.eval()
