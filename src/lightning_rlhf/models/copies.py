"""The copies of weights from which the fast layers sample, and whether a device has room."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from peft.tuners.lora import Linear as LoRALinear
from torch import nn
from transformers import PreTrainedModel

from lightning_rlhf.core.device_memory import available_memory
from lightning_rlhf.kernels.joint_linear import can_be_packed
from lightning_rlhf.kernels.products import computing_dtype

MOST_COPIED = 0.5
"""Largest share of the free memory that the copies may take."""


def copies_fit(causal_lm: PreTrainedModel) -> bool:
    """Return whether the copies for sampling do not strain the model's device; else warn.

    A CPU always copies: what a run samples does not depend on what else the machine does.
    """
    if causal_lm.device.type == "cpu":
        return True
    wanted, free = copied_bytes(causal_lm), available_memory(causal_lm.device)
    fit = wanted <= MOST_COPIED * free
    if not fit:
        warnings.warn(
            f"sampling makes no copies of the weights, which would take {wanted / 1e9:.1f} of "
            f"{free / 1e9:.1f} GB that are free, and is slower; model.kernels=plain never makes "
            "any",
            stacklevel=2,
        )
    return fit


def copied_bytes(causal_lm: PreTrainedModel) -> int:
    """Return the bytes of the copies of weights from which model.kernels=fast samples.

    They are all linear layers as a step of decoding reads them (`JointLinear`), in the dtype of the
    computation; the output layer, if it is packed or of another dtype; and in fp32 the layers that
    have adapters once more, with the adapters added.
    """
    dtype = computing_dtype(causal_lm)
    layers = [layer.weight for layer in linear_layers(causal_lm.base_model)]
    head = causal_lm.get_output_embeddings().weight
    copied = 0
    if all(weight.dtype in (dtype, torch.float32) for weight in layers):
        copied = sum(weight.numel() for weight in layers) * dtype.itemsize
        if head.dtype != dtype or can_be_packed(head):
            copied += head.numel() * dtype.itemsize
    if dtype != torch.float32:
        return copied
    adapted = (layer for layer in causal_lm.modules() if isinstance(layer, LoRALinear))
    return copied + sum(layer.base_layer.weight.nbytes for layer in adapted)


def linear_layers(trunk: nn.Module) -> Iterator[nn.Linear]:
    """Yield the linear layers of a trunk, without those of adapters."""
    for name, layer in trunk.named_modules():
        if isinstance(layer, nn.Linear) and "lora_" not in name:
            yield layer
