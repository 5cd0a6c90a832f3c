"""What a device other than the CPU changes besides numbers: copies of weights."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache

from lightning_rlhf.kernels.decoder import merged_adapters
from lightning_rlhf.kernels.decoding import can_decode
from lightning_rlhf.kernels.layers import OneDNNLinear, library_class, own_class
from lightning_rlhf.models.config import POLICY
from lightning_rlhf.models.roles import Roles, copied_bytes, linear_layers

from ..modules.conftest import LORA, language_model
from .device import NAME, Device


def test_copies_under_autocast_are_in_16_bits(device: Device) -> None:
    """Under autocast fp32 weights are copied once, in bf16: in fp32 they take four times as much.

    Of each layer with an adapter there are two copies in fp32; of the output layer one in bf16.
    """
    roles = Roles(language_model("qwen3"), "fast")
    roles.add_adapter(POLICY, LORA)
    numbers = sum(i * o for *_, i, o in linear_layers(roles.causal_lm.base_model))
    head = roles.causal_lm.get_output_embeddings().weight.numel()
    roles.to(NAME)
    assert copied_bytes(roles.causal_lm) == 2 * 4 * numbers
    with torch.autocast(NAME, torch.bfloat16):
        assert copied_bytes(roles.causal_lm) == 2 * (numbers + head)


def test_layers_of_fsdp_are_known_by_their_own_class() -> None:
    """As `fully_shard` makes them; a class that a user derives stays unknown."""
    roles = Roles(language_model("qwen3"))
    roles.add_adapter(POLICY, LORA)
    assert roles.kernels.kind == "fast"
    for layer in roles.causal_lm.modules():
        kind = type(layer)
        layer.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    linear = roles.causal_lm.base_model.layers[0].mlp.up_proj.base_layer
    assert own_class(linear) is OneDNNLinear
    assert library_class(roles.causal_lm.base_model.norm).__name__ == "Qwen3RMSNorm"
    assert can_decode(roles.causal_lm, DynamicCache(config=roles.causal_lm.config))
    with merged_adapters(roles.causal_lm):
        assert isinstance(roles.causal_lm.base_model.layers[0].mlp.up_proj, nn.Linear)
