"""Adapters merged into the weights say what they say beside them, and leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoRALinear
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_rlhf.models.config import POLICY, REFERENCE, LoRASettings
from lightning_rlhf.models.roles import Roles

TOKENS = torch.tensor([[3, 9, 4, 11, 7], [8, 2, 2, 5, 10]])


def a_policy(dtype: torch.dtype = torch.float32, *, tied: bool = True) -> Roles:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, initializer_range=0.2,
        tie_word_embeddings=tied, attention_bias=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
    roles = Roles(model)
    for role in ("sft", POLICY):
        roles.add_adapter(role, LoRASettings(r=4, alpha=8, target_modules="all-linear"))
        if role == "sft":
            roles._stacks[REFERENCE] = roles._stacks["sft"]
    with torch.no_grad():
        for name, parameter in roles.named_parameters():
            if "lora_" in name or "bias" in name:
                parameter.normal_(std=0.2)
    return roles


@torch.no_grad()
def logits(roles: Roles) -> Tensor:
    return roles.head(roles.hidden(TOKENS))


def lora_layers(roles: Roles) -> int:
    return sum(isinstance(module, LoRALinear) for module in roles.modules())


@pytest.mark.parametrize("role", [POLICY, REFERENCE, "base"])
def test_every_role_says_the_same_from_plain_layers(role: str) -> None:
    roles = a_policy()
    with roles.use_role(role):
        beside = logits(roles)
        with roles.merged():
            assert lora_layers(roles) == 0
            torch.testing.assert_close(logits(roles), beside, atol=1e-5, rtol=0)
        assert torch.equal(logits(roles), beside)
    roles.set_role(POLICY)
    assert (logits(roles) - beside).abs().max() > 0.1 or role == POLICY


@torch.no_grad()
def test_the_plain_layers_go_to_onednn_where_that_is_faster(
    by_onednn: list[tuple[int, ...]],
) -> None:
    roles = a_policy()
    adapted = sum(isinstance(module, LoRALinear) for module in roles.modules())
    by_onednn.clear()
    with roles.merged():
        roles.hidden(TOKENS)
    assert len(by_onednn) == adapted > 0


def test_afterwards_the_very_modules_are_back() -> None:
    roles = a_policy()
    before: dict[str, Any] = {name: id(module) for name, module in roles.named_modules()}
    state = {name: tensor.clone() for name, tensor in roles.state_dict().items()}
    trained = [name for name, p in roles.named_parameters() if p.requires_grad]
    with pytest.raises(KeyboardInterrupt), roles.merged():
        raise KeyboardInterrupt
    assert {name: id(module) for name, module in roles.named_modules()} == before
    assert list(before) == [name for name, _ in roles.named_modules()]
    assert all(torch.equal(tensor, state[name]) for name, tensor in roles.state_dict().items())
    assert [name for name, p in roles.named_parameters() if p.requires_grad] == trained


def test_in_16_bits_the_layers_stay_as_they_are() -> None:
    """bf16 keeps 8 binary digits: the sum would lose most of a small adapter."""
    roles = a_policy(torch.bfloat16)
    layers = lora_layers(roles)
    beside = logits(roles)
    with roles.merged():
        assert lora_layers(roles) == layers > 0
        assert torch.equal(logits(roles), beside)


@pytest.mark.parametrize("option", [{"use_dora": True}, {"lora_bias": True}])
def test_an_adapter_that_is_no_plain_sum_stays_as_it_is(option: dict[str, bool]) -> None:
    """From another program: DoRA scales the columns of W + B A; an adapter may add a bias."""
    roles = a_policy()
    roles.model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], **option))
    roles._stacks["other"] = ("other",)
    roles.set_role("other")
    with torch.no_grad():
        for name, parameter in roles.named_parameters():
            if ".other." in name:
                parameter.add_(0.1)
    beside = logits(roles)
    with roles.merged():
        assert lora_layers(roles) == 2  # q_proj of two layers; the others have nothing to add
        torch.testing.assert_close(logits(roles), beside, atol=1e-5, rtol=0)


def test_no_other_role_is_played_from_folded_weights() -> None:
    """They are the acting role's; another one would speak with its voice."""
    roles = a_policy()
    roles.set_role(POLICY)
    with roles.merged():
        with pytest.raises(RuntimeError, match="reference cannot be activated"):
            roles.set_role(REFERENCE)
        with roles.merged(), roles.use_role(POLICY):
            assert lora_layers(roles) == 0
        with pytest.raises(RuntimeError, match="reference cannot be activated"):
            roles.set_role(REFERENCE)
    with roles.use_role(REFERENCE):
        assert lora_layers(roles) > 0
