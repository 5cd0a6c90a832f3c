"""A step by one token has the outputs of the model's own layers."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaModel

from lightning_rlhf.core.records import Prompts
from lightning_rlhf.kernels.decoding import DecodeStep, can_decode, decode_step
from lightning_rlhf.models.config import POLICY, LoRASettings
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.native import NativeSampler, last_hidden, position_ids
from lightning_rlhf.rollout.sampler import SamplingParams

from ..matrix import matrix
from .conftest import build_model

VOCABULARY, STEPS = 61, 6
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": False},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3_5_text": {"linear_value_head_dim": 16, "tie_word_embeddings": False},
}


def build(name: str, **changes: Any) -> Roles:
    """Random weights, norms and biases included, under an adapter."""
    changes = SHAPES.get(name, {}) | changes
    model = build_model(name.split(",")[0], vocab_size=VOCABULARY, **changes)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "A_log" not in parameter_name:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    roles = Roles(model)
    roles.add_adapter(POLICY, LoRASettings(r=4, alpha=8, target_modules="all-linear"))
    with torch.no_grad():
        for parameter_name, parameter in roles.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.05)
    return roles


def prefix() -> tuple[Tensor, Tensor]:
    """Prompts of five, two and four tokens, padded to the left."""
    tokens = torch.arange(15).view(3, 5) * 7 % VOCABULARY
    mask = torch.arange(5) >= torch.tensor([0, 3, 1])[:, None]
    return tokens, mask


@torch.no_grad()
def stepped(roles: Roles, *, ours: bool, merged: bool = True) -> Tensor:
    """Hidden states of some tokens one by one; after two of them rows are dropped and mixed."""
    tokens, mask = prefix()
    cache, found = DynamicCache(config=roles.causal_lm.config), []
    with roles.merged() if merged else nullcontext():
        last_hidden(roles, cache, tokens, mask, position_ids(mask))
        assert can_decode(roles.causal_lm, cache)
        step = DecodeStep(roles.causal_lm, cache)
        for i in range(STEPS):
            if i == 2:
                left = torch.tensor([2, 0])
                cache.reorder_cache(left)
                mask = mask[left]
            mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.bool)], dim=1)
            following = (torch.arange(len(mask)) + 11 * i)[:, None] % VOCABULARY
            positions = mask.sum(1, keepdim=True) - 1
            if ours:
                found.append(step(following, mask, positions))
            else:
                found.append(last_hidden(roles, cache, following, mask, positions))
    return torch.cat(found)


@pytest.mark.parametrize(("merged", "smallest"), matrix(
    [(merged, smallest) for merged in (True, False) for smallest in (0, 2**30)],
    (True, 0), (False, 2**30),
))  # fmt: skip
@pytest.mark.parametrize("name", SHAPES)
def test_each_step_is_that_of_the_models_own_layers(
    name: str, merged: bool, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of larger models are packed."""
    monkeypatch.setattr("lightning_rlhf.kernels.lora.SMALLEST", smallest)
    roles = build(name)
    expected = stepped(roles, ours=False, merged=merged)
    found = stepped(roles, ours=True, merged=merged)
    assert found.shape == (3 + 3 + 4 * 2, 32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    step = DecodeStep(roles.causal_lm, DynamicCache(config=roles.causal_lm.config))
    with torch.no_grad():
        torch.testing.assert_close(step.head(found), roles.head(found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("smallest", "dtype"), [(0, torch.bfloat16), (2**30, torch.float32)], ids=["packed", "plain"]
)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text"])
def test_in_16_bits_a_step_is_as_near_to_fp32_as_the_models_own_layers(
    name: str, smallest: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rounds in other places. Root mean squares of the distance to fp32.

    dtype: of the weights; those in fp32 are rounded by autocast.
    """
    monkeypatch.setattr("lightning_rlhf.kernels.lora.SMALLEST", smallest)
    roles = build(name)
    exact = stepped(roles, ours=False)
    roles.causal_lm.to(dtype)
    with torch.no_grad():
        for parameter_name, parameter in roles.named_parameters():
            if "lora_" in parameter_name:  # as they are trained: in fp32, rounded by autocast
                parameter.data = parameter.data.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = (
            (stepped(roles, ours=side).float() - exact).square().mean().sqrt()
            for side in (True, False)
        )
    assert theirs > 0
    assert ours < 1.2 * theirs


@torch.no_grad()
def test_a_step_that_is_wrong_is_not_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = DecodeStep.__call__

    def late(step: DecodeStep, tokens: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        return forward(step, tokens, mask, positions + 1)

    monkeypatch.setattr(DecodeStep, "__call__", late)
    model = build("qwen3", num_hidden_layers=32).causal_lm.to(torch.bfloat16)
    with pytest.warns(UserWarning, match="the fast decoding step gives other hidden states"):
        assert decode_step(model, DynamicCache(config=model.config)) is None
    assert decode_step(model, DynamicCache(config=model.config)) is None  # without a warning


def test_generation_steps_by_it(make_prompts: Any) -> None:
    """The first token is read with the prompt, the last one is not read; one step is a check.

    The step that is checked is the one that decodes: its weights are copied once.
    """
    prompts: Prompts = make_prompts([7, 8, 9], [13])
    step_patch, made_patch = (
        patch.object(DecodeStep, name, autospec=True, side_effect=getattr(DecodeStep, name))
        for name in ("__call__", "__init__")
    )
    with step_patch as step, made_patch as made:
        params = SamplingParams(max_response_tokens=5, temperature=1.0, end_token_ids=(VOCABULARY,))
        sampler = NativeSampler(build("qwen3"), params)
        sampler.sample(prompts, 1, torch.Generator().manual_seed(0), torch.arange(len(prompts)))
    assert step.call_count == 4 + 1
    assert made.call_count == 1


def steps(roles: Roles) -> bool:
    return can_decode(roles.causal_lm, DynamicCache(config=roles.causal_lm.config))


def test_what_it_does_not_compute_is_left_to_the_model() -> None:
    """Quantised layers are classes of their own, with what looks like weights; DoRA is no sum."""
    assert steps(build("qwen3"))
    assert not steps(build("gpt2"))
    assert not steps(build("qwen3", hidden_act="gelu"))
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    assert not steps(build("qwen2", **windows))
    roles, other = build("qwen3"), build("qwen3")
    other.causal_lm.base_model.layers[1].mlp.down_proj.use_dora[POLICY] = True
    assert not steps(other)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # rounds fp32, or finds weights in bf16
        assert steps(roles)
        roles.causal_lm.bfloat16()
        assert steps(roles)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not steps(roles)
    linear = roles.causal_lm.base_model.layers[1].mlp.down_proj.base_layer
    linear.__class__ = type("Other", (nn.Linear,), {})
    assert not steps(roles)


def test_a_trunk_that_is_derived_from_a_known_one_may_compute_something_else() -> None:
    """One that scales its embeddings: neither steps nor packs."""

    class Scaled(LlamaModel):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            embedded = self.embed_tokens(input_ids) * 5
            return super().forward(inputs_embeds=embedded, use_cache=False)

    model = build("llama").causal_lm
    model.model.__class__ = Scaled
    roles = Roles(model)
    assert not steps(roles)
    tokens, mask = prefix()
    with torch.no_grad():
        found, all_of_it = roles.hidden_at(tokens, mask), roles.hidden(tokens)
    assert torch.equal(found, all_of_it[mask])
