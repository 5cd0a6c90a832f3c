"""What a device other than the CPU changes besides numbers: copies of weights."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_rlhf.kernels.decoder import merged_adapters
from lightning_rlhf.kernels.decoding import DecodeStep, can_decode
from lightning_rlhf.kernels.layers import OneDNNLinear, library_class, own_class
from lightning_rlhf.models.config import POLICY
from lightning_rlhf.models.language_model import copied_bytes, copies_fit, linear_layers
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.ppo import TRAINING
from lightning_rlhf.rollout.decode_state import roomy_cache

from ..modules.conftest import LORA, language_model, prompts
from .conftest import Make
from .device import NAME, Device


def test_no_copy_of_the_weights_where_it_strains_the_memory(
    make_ppo: Make, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same responses, by the layers with the adapters beside."""
    found = {}
    for free in (1e9, 1e4):
        monkeypatch.setattr(
            "lightning_rlhf.models.language_model.available_memory", lambda _, f=free: f
        )
        module = make_ppo()
        module.roles._kernel_choice = "fast"
        module.to(NAME)
        context: Any = warnings.catch_warnings()
        if free == 1e4:
            context = pytest.warns(UserWarning, match=r"no copies .* model\.kernels=plain")
        step = patch.object(DecodeStep, "__init__", autospec=True, side_effect=DecodeStep.__init__)
        with context, step as made:
            found[free] = module.collector.sampler.sample(
                prompts(4).to(NAME), 1, module.generator(TRAINING, 0)
            )
        assert module.roles.copies_weights == (free == 1e9)
        assert made.call_count == (free == 1e9)
    mask = found[1e9].mask.cpu()
    assert torch.equal(found[1e4].mask.cpu(), mask)
    assert torch.equal(found[1e4].tokens.cpu()[mask], found[1e9].tokens.cpu()[mask])
    torch.testing.assert_close(
        found[1e4].logprobs.cpu(), found[1e9].logprobs.cpu(), rtol=1e-5, atol=1e-5
    )


def test_a_copy_in_16_bits_has_room_where_those_in_fp32_do_not(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autocast fp32 weights are copied once, in bf16: in fp32 they take four times as much.

    Of each layer with an adapter there are two copies in fp32; of the output layer one in bf16.
    """
    roles = Roles(language_model("qwen3"), "fast")
    roles.add_adapter(POLICY, LORA)
    numbers = sum(i * o for *_, i, o in linear_layers(roles.causal_lm.base_model))
    head = roles.causal_lm.get_output_embeddings().weight.numel()
    roles.to(NAME)
    assert copied_bytes(roles.causal_lm) == 2 * 4 * numbers
    monkeypatch.setattr(
        "lightning_rlhf.models.language_model.available_memory", lambda _: 3 * 4 * numbers
    )
    with torch.autocast(NAME, torch.bfloat16):
        assert copied_bytes(roles.causal_lm) == 2 * (numbers + head)
        assert copies_fit(roles.causal_lm)
    with pytest.warns(UserWarning, match="no copies of the weights"):
        assert not copies_fit(roles.causal_lm)


def test_the_cpu_copies_whatever_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rlhf.models.language_model.available_memory", lambda _: 0)
    assert Roles(language_model("qwen3")).copies_weights


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
    assert can_decode(roles.causal_lm, roomy_cache(roles.causal_lm.config, 8))
    with merged_adapters(roles.causal_lm):
        assert isinstance(roles.causal_lm.base_model.layers[0].mlp.up_proj, nn.Linear)
