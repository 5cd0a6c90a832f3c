"""One base, several roles: who sees which adapters, and what can be trained."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.kernels.patch import rounding_of
from lightning_rlhf.models.build_roles import (
    add_critic,
    attach_reward,
    check_positions,
    random_reward,
    start_from,
)
from lightning_rlhf.models.config import BASE, CRITIC, POLICY, REFERENCE, REWARD, SFT, LoRASettings
from lightning_rlhf.models.roles import Roles

from .conftest import build_model, randomise

MASK = torch.ones(3, 9, dtype=torch.bool)
Train = Callable[[Roles, str, int], None]


def load(lineage: Any) -> Roles:
    """As stage=ppo puts its models together."""
    roles = start_from(lineage.config, lineage.sft, trainable=False, seed=0)
    assert attach_reward(roles, REWARD, lineage.rm, lineage.config, lineage.hash) is roles
    roles.add_adapter(POLICY, lineage.config.lora)
    critic = add_critic(roles, lineage.config, "head", sft=lineage.sft, reward=None,
                        scale=(0.0, 1.0), seed=0)  # fmt: skip
    assert critic == (roles, POLICY)
    return roles


def plain_sft(lineage: Any) -> PreTrainedModel | PeftModel:
    """The SFT model as any other program loads it."""
    if lineage.finetune == "full":
        return AutoModelForCausalLM.from_pretrained(lineage.sft.path).eval()
    base = AutoModelForCausalLM.from_pretrained(lineage.base).eval()
    return PeftModel.from_pretrained(base, lineage.sft.path).eval()


@torch.no_grad()
def logits(roles: Roles, role: str, tokens: Tensor) -> Tensor:
    with roles.use_role(role):
        return roles.head(roles.hidden(tokens))


@torch.no_grad()
def test_the_reference_is_the_sft_model_bit_for_bit_and_the_policy_starts_there(
    lineage: Any, tokens: Tensor
) -> None:
    expected = plain_sft(lineage)(input_ids=tokens).logits
    roles = start_from(lineage.config, lineage.sft, trainable=False, seed=0)
    alone = logits(roles, REFERENCE, tokens)
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=0)
    attach_reward(roles, REWARD, lineage.rm, lineage.config, lineage.hash)
    assert torch.equal(logits(roles, REFERENCE, tokens), alone)
    roles.add_adapter(POLICY, lineage.config.lora)
    assert torch.equal(logits(roles, REFERENCE, tokens), alone)
    assert torch.equal(logits(roles, POLICY, tokens), alone)
    # The SFT model is not the base, so that this could not hold by accident.
    base = AutoModelForCausalLM.from_pretrained(lineage.base).eval()(tokens).logits
    assert (base - expected).abs().max() > 0.1


def test_training_an_adapter_changes_its_own_role_alone(lineage: Any, tokens: Tensor) -> None:
    roles = load(lineage)
    before = {role: logits(roles, role, tokens) for role in (BASE, REFERENCE, POLICY, REWARD)}
    with torch.no_grad():
        score = roles.reward(tokens, MASK)

    randomise(roles, POLICY, 11)
    after = {role: logits(roles, role, tokens) for role in before}
    assert (after[POLICY] - before[POLICY]).abs().max() > 0.1
    for role in (BASE, REFERENCE, REWARD):
        assert torch.equal(after[role], before[role]), role
    with torch.no_grad():
        assert torch.equal(roles.reward(tokens, MASK), score)

    randomise(roles, REWARD, 12)
    last = {role: logits(roles, role, tokens) for role in before}
    assert (last[REWARD] - before[REWARD]).abs().max() > 0.1
    assert torch.equal(last[POLICY], after[POLICY])
    for role in (BASE, REFERENCE):
        assert torch.equal(last[role], before[role]), role
    with torch.no_grad():
        assert (roles.reward(tokens, MASK) - score).abs().max() > 0.01


def test_the_reward_is_that_of_its_own_stage(lineage: Any, tokens: Tensor) -> None:
    """Recomputed with plain libraries: base, adapters, head times last hidden state."""
    base = AutoModelForCausalLM.from_pretrained(
        lineage.sft.path if lineage.finetune == "full" else lineage.base
    )
    model = PeftModel.from_pretrained(base, lineage.rm.adapter, adapter_name="rm").eval()
    if lineage.finetune == "lora":
        model.load_adapter(str(lineage.sft.path), adapter_name="sft")
        model.base_model.set_adapter(["sft", "rm"])
    roles = load(lineage)
    weight = roles.heads[REWARD].linear.weight[0]
    with torch.no_grad():
        hidden = model(tokens, output_hidden_states=True).hidden_states[-1][:, -1]
        torch.testing.assert_close(roles.reward(tokens, MASK), hidden @ weight, atol=1e-5, rtol=0)


def test_acting_restores_the_role_after_an_exception_and_when_nested(
    lineage: Any, tokens: Tensor
) -> None:
    roles = load(lineage)
    randomise(roles, POLICY, 11)
    roles.set_role(POLICY)
    with torch.no_grad():
        as_policy = roles.hidden(tokens)

        def nested() -> None:
            with roles.use_role(REWARD):
                with roles.use_role(REFERENCE), roles.use_role(REFERENCE):
                    assert not torch.equal(roles.hidden(tokens), as_policy)
                with roles.use_role(POLICY):
                    assert torch.equal(roles.hidden(tokens), as_policy)
                assert not torch.equal(roles.hidden(tokens), as_policy)
                raise KeyError("inside")

        with pytest.raises(KeyError, match="inside"):
            nested()
        assert torch.equal(roles.hidden(tokens), as_policy)


# gpt2 has learned positions: unlike rotary ones, they show a row that was shifted as a whole.
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "gpt2"])
@torch.no_grad()
def test_padding_behind_changes_no_hidden_state_and_on_either_side_no_reward(
    tokens: Tensor, model_type: str
) -> None:
    roles = Roles(build_model(model_type))
    random_reward(roles, REWARD, torch.Generator().manual_seed(0))
    for row in tokens:
        whole = torch.ones(1, len(row), dtype=torch.bool)
        alone = roles.hidden(row[None])[0]
        reward = roles.reward(row[None], whole)
        for pad in ((4, 0), (0, 4), (2, 3)):
            # Padded with the eos id, which also stands inside the text: only the mask tells.
            padded = F.pad(row[None], pad, value=1)
            mask = F.pad(whole, pad, value=False)
            torch.testing.assert_close(roles.reward(padded, mask), reward, atol=1e-5, rtol=0)
        behind = roles.hidden(F.pad(row[None], (0, 3), value=1))[0, : len(row)]
        torch.testing.assert_close(behind, alone, atol=1e-5, rtol=0)


def test_a_model_that_changes_its_logits_after_the_output_layer_is_refused() -> None:
    Roles(build_model("granite", logits_scaling=1.0))
    with pytest.raises(CheckpointError, match="granite"):
        Roles(build_model("granite", logits_scaling=8.0))


def test_rounding_in_16_bits_grows_with_the_square_root_of_the_layers() -> None:
    """3e-2 up to 4 layers; of 16 it is sqrt(16 / 4) = 2 times that. fp32 has room in any case."""
    assert rounding_of(torch.float32, 16) == 1e-4
    assert rounding_of(torch.float16, 4) == pytest.approx(3e-2)
    assert rounding_of(torch.bfloat16, 16) == pytest.approx(6e-2)


@pytest.mark.parametrize(("model_type", "refused"), [("gpt2", True), ("qwen3", False)])
def test_more_tokens_than_the_model_has_positions(model_type: str, refused: bool) -> None:
    """A table of positions ends; computed ones go on, though nothing was trained there."""
    roles = Roles(build_model(model_type))
    check_positions(roles, 128, "a prompt")
    said = "a prompt has 129 tokens, more than the 128 that the model "
    said += "has positions for" if refused else r"was made for .*beyond which .*; lower data\."
    with pytest.raises(ConfigError, match=said) if refused else pytest.warns(match=said):
        check_positions(roles, 129, "a prompt")
    with pytest.raises(ConfigError, match=said) if refused else nullcontext():
        check_positions(roles, 129, "a prompt", warns=False)


def learned(roles: Roles) -> set[str]:
    """Which adapters have matrices that are trained."""
    matrices = [(name, p) for name, p in roles.named_parameters() if "lora_" in name]
    return {name.split(".")[-2] for name, matrix in matrices if matrix.requires_grad}


@pytest.mark.parametrize(("family", "targets"), [("qwen3", ("q_proj",)), ("gpt2", ("c_attn",))])
def test_the_same_adapters_learn_whatever_is_added_used_and_exported(
    family: str, targets: tuple[str, ...]
) -> None:
    """GPT-2's layers are no plain linear ones, so that PEFT puts their adapters on."""
    roles = Roles(build_model(family))
    lora = LoRASettings(r=2, alpha=4, target_modules=targets)
    roles.add_adapter(SFT, lora)
    roles._stack(SFT, trainable=False)
    roles._stacks[REFERENCE] = roles._stacks[SFT]
    for role in (POLICY, CRITIC):
        roles.add_adapter(role, lora)
    for name, parameter in roles.named_parameters():
        if f"lora_B.{SFT}." in name or f"lora_B.{POLICY}." in name:
            torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.arange(8)[None]
    said = {}
    for role in (POLICY, REFERENCE, BASE, CRITIC):
        with torch.no_grad(), roles.use_role(role):
            said[role] = roles.hidden(tokens)
            assert learned(roles) == {POLICY, CRITIC}
    assert torch.equal(said[REFERENCE], said[CRITIC])
    assert not torch.equal(said[REFERENCE], said[POLICY])
    assert not torch.equal(said[REFERENCE], said[BASE])
    with roles.stacked(POLICY):
        pass
    assert learned(roles) == {POLICY, CRITIC}
