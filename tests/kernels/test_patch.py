"""The switch: which layers a model gets, and that it gets its own back where ours do not fit."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3 import modeling_qwen3

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.records import Prompts
from lightning_rlhf.kernels import patch
from lightning_rlhf.kernels.decoder import PackedDecoderLayer
from lightning_rlhf.kernels.layers import FastLayer
from lightning_rlhf.kernels.patch import use_kernels
from lightning_rlhf.models.config import POLICY
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import SamplingParams

from .conftest import LORA, VOCABULARY, build_model

FAMILIES = ("qwen3", "llama", "qwen2", "qwen3_5_text")
PARAMS = SamplingParams(max_response_tokens=4, temperature=1.0, end_token_ids=(VOCABULARY,))
TOKENS = torch.arange(12).view(2, 6) * 7 % VOCABULARY
WANTED = torch.tensor([[False] * 3 + [True] * 3, [False, True, True, False, False, False]])


def classes(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules()]


def is_fast(model: nn.Module) -> bool:
    return any(isinstance(module, FastLayer) for module in model.modules())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text", "gpt2"])
def test_plain_is_the_libraries_own_layers_from_end_to_end(family: str, make_prompts: Any) -> None:
    """Classes, attention, an instance's own attributes; hidden states are the library's bits."""
    model = build_model(family)
    before = classes(model), model.config._attn_implementation
    own = [set(vars(module)) for module in model.modules()]
    with torch.no_grad():
        expected = model.base_model(input_ids=TOKENS, use_cache=False).last_hidden_state[WANTED]
    roles = Roles(model, "plain")
    assert str(roles.kernels) == "kernels: plain (model.kernels=plain)"
    assert (classes(model), model.config._attn_implementation) == before
    assert [set(vars(module)) for module in model.modules()] == own
    with torch.no_grad():
        assert torch.equal(roles.hidden_at(TOKENS, WANTED), expected)
    roles.add_adapter(POLICY, LORA)
    with roles.merged():
        assert {kind.__module__.partition(".")[0] for kind in classes(roles.model)} <= {
            "torch", "transformers", "peft",
        }  # fmt: skip
    prompts: Prompts = make_prompts([7, 8, 9], [13])
    rollout = NativeSampler(roles, PARAMS).sample(
        prompts, 1, torch.Generator().manual_seed(0), torch.arange(len(prompts))
    )
    assert rollout.response_mask.all()
    assert not is_fast(roles)


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_is_fast_for_a_known_family_on_the_cpu_and_gives_the_layers_back(family: str) -> None:
    model = build_model(family)
    before = classes(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        roles = Roles(model)
    assert str(roles.kernels) == f"kernels: fast ({model.config.model_type} on the CPU)"
    assert all(isinstance(layer, PackedDecoderLayer) for layer in model.base_model.layers)
    patch.unpatch(model)
    assert classes(model) == before
    again = Roles(model)
    again.add_adapter(POLICY, LORA)
    patch.unpatch(model)
    assert not is_fast(again)


def test_auto_leaves_other_families_alone_and_fast_refuses_them() -> None:
    roles = Roles(build_model("gpt2"))
    assert str(roles.kernels) == "kernels: plain (gpt2 has layers of another kind)"
    assert not is_fast(roles)
    with pytest.raises(ConfigError, match=r"model\.kernels is 'fast', but gpt2 .*Qwen3"):
        Roles(build_model("gpt2"), "fast")


def test_weights_that_are_sharded_or_elsewhere_are_left_alone() -> None:
    model = build_model("qwen3")
    next(model.parameters()).device_mesh = "two machines"  # type: ignore[attr-defined]
    assert use_kernels("auto", model).kind == "plain"
    with pytest.raises(ConfigError, match="sharded"):
        use_kernels("fast", model)
    elsewhere = build_model("qwen3").to("meta")
    assert (
        str(use_kernels("auto", elsewhere)) == "kernels: plain (fast ones are not measured on meta)"
    )


def test_auto_decides_anew_where_the_weights_are_moved() -> None:
    roles = Roles(build_model("qwen3"))
    roles.add_adapter(POLICY, LORA)
    assert is_fast(roles)
    roles.to("meta")
    assert not is_fast(roles)
    assert roles.kernels.kind == "plain"


def test_a_library_that_changed_a_layer_computes_by_itself_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault, forward = "the fast layers give other hidden states", modeling_qwen3.Qwen3RMSNorm.forward

    def twice(self: Any, hidden_states: Tensor) -> Tensor:
        return 1.5 * forward(self, hidden_states)

    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", twice)
    model = build_model("qwen3")
    with torch.no_grad():
        expected = model.base_model(input_ids=TOKENS, use_cache=False).last_hidden_state[WANTED]
    with pytest.warns(UserWarning, match=f"slower: qwen3 of transformers .*{fault}"):
        roles = Roles(model)
    assert roles.kernels.kind == "plain"
    assert not is_fast(roles)
    with torch.no_grad():
        assert torch.equal(roles.hidden_at(TOKENS, WANTED), expected)
    with pytest.raises(ConfigError, match=f"model.kernels is 'fast', but .*{fault}"):
        Roles(build_model("qwen3"), "fast")
