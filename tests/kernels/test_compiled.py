"""Layers as functions say and learn what the modules do, compiled or not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.kernels import compiled, products
from lightning_rlhf.kernels.decoder import compile_layers
from lightning_rlhf.models.config import LoRASettings
from lightning_rlhf.models.loading import load_causal_lm
from lightning_rlhf.models.roles import POLICY, Roles

from .conftest import LORA, build_config, build_model
from .test_layers import FAMILIES, a_policy, relative
from .test_packing import WANTED, outcome, tokens_of

pytestmark = pytest.mark.usefixtures("by_torch")
MASK = torch.tensor(WANTED["a response in each row"])
CALLS = {"qwen3": (2, 0), "llama": (2, 0), "qwen2": (2, 0), "qwen3_5_text": (1, 3)}
"""Layers that are computed whole, and those of which the mixer of positions is not."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that were asked for; they are computed as they stand, without a compiler."""
    names: list[str] = []

    def as_it_stands(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        names.append(function.__name__)
        return function

    monkeypatch.setattr(compiled, "compiled", as_it_stands)
    return names


def both(roles: Roles, mask: Tensor = MASK) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Hidden states and gradient by the modules, and by the functions."""
    tokens = tokens_of(mask)
    plain = outcome(roles, roles.hidden_at(tokens, mask))
    compile_layers(roles.causal_lm)
    return plain, outcome(roles, roles.hidden_at(tokens, mask))


def assert_alike(plain: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor], bound: float) -> None:
    assert plain[1].abs().max() > 0
    for ours, expected in zip(found, plain, strict=True):
        assert relative(ours, expected) <= bound


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_gradients_are_those_of_the_modules(
    family: str, wanted: list[list[bool]], asked: list[str]
) -> None:
    assert_alike(*both(a_policy(family), torch.tensor(wanted)), 1e-5)
    whole, behind = CALLS[family]
    assert sorted(asked) == ["_decoder_layer"] * whole + ["_feed_forward"] * behind


@pytest.mark.parametrize("family", FAMILIES)
def test_all_weights_can_be_trained_through_them(family: str, asked: list[str]) -> None:
    model = build_model(family)
    roles = Roles(model.requires_grad_(True))
    tokens = tokens_of(MASK)

    def learned() -> tuple[Tensor, Tensor]:
        roles.zero_grad()
        hidden = roles.hidden_at(tokens, MASK)
        (hidden * torch.arange(hidden.numel()).view(hidden.shape).cos()).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.base_model.parameters()])
        return hidden.detach(), gradient

    plain = learned()
    compile_layers(model)
    assert_alike(plain, learned(), 1e-5)
    assert asked


@pytest.mark.parametrize("family", FAMILIES)
def test_with_gradient_checkpointing_too(family: str, asked: list[str]) -> None:
    roles = a_policy(family)
    roles.recompute_layers()
    assert_alike(*both(roles), 1e-5)
    assert len(asked) == 2 * sum(CALLS[family])


def test_two_adapters_are_added(asked: list[str]) -> None:
    roles = a_policy("qwen3")
    roles._stacks["reference"] = (POLICY,)
    roles.add_adapter("other", LoRASettings(r=2, alpha=1, target_modules=("q_proj", "down_proj")))
    for name, parameter in roles.named_parameters():
        if "lora_B.other" in name:
            nn.init.normal_(parameter, std=0.05)
    assert roles._stacks["other"] == (POLICY, "other")
    tokens = tokens_of(MASK)

    def learned() -> tuple[Tensor, Tensor]:
        roles.zero_grad()
        hidden = roles.hidden_at(tokens, MASK)
        (hidden * torch.arange(hidden.numel()).view(hidden.shape).cos()).sum().backward()
        return hidden.detach(), torch.cat([p.grad.flatten() for p in roles.trained_by("other")])

    plain = learned()
    compile_layers(roles.causal_lm)
    assert_alike(plain, learned(), 1e-5)
    assert asked


def dropout(roles: Roles) -> None:
    roles.train()
    for name, module in roles.named_modules():
        if name.endswith("lora_dropout"):
            module[POLICY] = nn.Dropout(0.5)


def merge(roles: Roles) -> None:
    roles.model.merge_adapter([POLICY])


def another_activation(roles: Roles) -> None:
    for layer in roles.causal_lm.base_model.layers:
        layer.mlp.act_fn = nn.GELU()  # and dropout, or attention would be compiled whole
        layer.self_attn.q_proj.lora_dropout[POLICY] = nn.Dropout(0.5)
    roles.train()


def other_digits(roles: Roles) -> None:
    roles.causal_lm.to(torch.bfloat16)


@pytest.mark.parametrize("change", [dropout, merge, another_activation, other_digits])
def test_what_computes_something_else_is_left_to_the_modules(
    change: Callable[[Roles], None], asked: list[str]
) -> None:
    roles = a_policy("qwen3")
    compile_layers(roles.causal_lm)
    change(roles)
    for parameter in roles.causal_lm.parameters():
        if parameter.dtype == torch.bfloat16 and parameter.requires_grad:
            parameter.data = parameter.data.float()
    roles.hidden_at(tokens_of(MASK), MASK)
    assert not asked


def sliding(roles: Roles) -> None:
    for layer in roles.causal_lm.base_model.layers:
        assert layer.self_attn.sliding_window == 4


def eager(roles: Roles) -> None:
    roles.causal_lm.set_attn_implementation("eager")


WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}


@pytest.mark.parametrize(("change", "shape"), [(sliding, WINDOWS), (eager, {})])
def test_another_attention_is_left_to_the_modules(
    change: Callable[[Roles], None], shape: dict[str, Any], asked: list[str]
) -> None:
    roles = a_policy("qwen3", **shape)
    change(roles)
    assert_alike(*both(roles), 1e-5)
    assert asked == ["_feed_forward"] * 2


def test_fp32_weights_under_autocast_are_left_to_the_modules(asked: list[str]) -> None:
    roles = a_policy("qwen3")
    compile_layers(roles.causal_lm)
    with torch.autocast("cpu", torch.bfloat16):
        roles.hidden_at(tokens_of(MASK), MASK)
    assert not asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp32_that_onednn_multiplies_is_left_to_the_modules(
    dtype: torch.dtype, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "fp32_by_onednn", lambda: True)
    roles = Roles(build_model("qwen3").to(dtype))
    compile_layers(roles.causal_lm)
    roles.hidden_at(tokens_of(MASK), MASK)
    assert asked == ([] if dtype == torch.float32 else ["_decoder_layer"] * 2)


def test_a_model_without_its_adapters_is_left_to_the_modules(asked: list[str]) -> None:
    roles = a_policy("qwen3")
    compile_layers(roles.causal_lm)
    with roles.model.disable_adapter():
        roles.hidden_at(tokens_of(MASK), MASK)
    assert not asked


def test_quantised_weights_are_refused() -> None:
    config = build_config(compile=True, name_or_path="/nowhere", quantization="int8")
    with pytest.raises(ConfigError, match=r"model\.quantization.*int8.*none with model\.compile"):
        load_causal_lm(config, trainable=False, seed=0)


def test_nothing_is_compiled_that_nothing_is_learned_from(asked: list[str]) -> None:
    roles = a_policy("qwen3")
    compile_layers(roles.causal_lm)
    with torch.no_grad():
        roles.hidden_at(tokens_of(MASK), MASK)
    assert not asked


def test_layers_of_another_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.compile=true, but gpt2 .*Qwen3"):
        compile_layers(build_model("gpt2"))


def test_without_a_compiler_it_is_refused_before_a_model_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_there(function: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nin: g++, clang++")

    monkeypatch.setattr(compiled, "compiled", none_there)
    config = build_config(compile=True, name_or_path="/nowhere", dtype="bfloat16")
    with pytest.raises(
        ConfigError, match=r"^model\.compile=true, but .*: No working C\+\+ compiler found; allowed"
    ):
        load_causal_lm(config, trainable=False, seed=0)


@pytest.fixture
def programs() -> Iterator[None]:
    """None that another test has left, and none that is left behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_compiler_knows_the_size_of_a_head_and_divides_no_length(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For heads of any size, and lengths that it can only divide out, it writes slow loops."""
    graphs: list[GraphModule] = []

    def seen(graph: GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        graphs.extend(part for part in graph.modules() if isinstance(part, GraphModule))
        return graph.forward

    traced = cache(partial(torch.compile, backend=seen, dynamic=True, fullgraph=True))
    monkeypatch.setattr(compiled, "compiled", traced)
    roles = Roles(build_model(family, head_dim=6))
    roles.add_adapter(POLICY, LORA)
    roles.bfloat16()
    compile_layers(roles.causal_lm)
    mask = torch.zeros(2, 80, dtype=torch.bool)  # 8 + 80 of 2 x 80 positions are computed
    mask[0, 4:8], mask[1, 35:] = True, True
    roles.hidden_at(tokens_of(mask), mask)
    shapes: set[str] = set()
    for graph in graphs:
        values = [n.meta.get("example_value") for n in graph.graph.nodes]
        numbers = [v.node for v in values if isinstance(v, torch.SymInt)]
        assert 6 not in [n.hint for n in numbers if not n.expr.is_number]
        shapes |= {str(size) for v in values if isinstance(v, Tensor) for size in v.shape}
    assert {"6", "24"} <= shapes
    assert not [shape for shape in shapes if "/" in shape]


needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"
)


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("family", ["qwen3_5_text"])
def test_compiled_they_say_and_learn_the_same(family: str) -> None:
    compiled.check_compiler()
    roles = a_policy(family)
    for mask in (MASK, torch.tensor(WANTED["rows of one length"])):
        assert_alike(*both(roles, mask), 1e-5)
        for layer in roles.causal_lm.base_model.layers:
            layer.compiles = False


@pytest.mark.slow
@needs_a_compiler
def test_compiled_under_autocast_they_are_as_near_to_the_truth() -> None:
    """The truth: the same weights in fp32."""
    roles = a_policy("qwen3")
    truth = outcome(roles, roles.hidden_at(tokens_of(MASK), MASK))
    for name, parameter in roles.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        plain, found = both(roles)
    for ours, modules, exact in zip(found, plain, truth, strict=True):
        assert relative(ours, exact) < 1.5 * relative(modules, exact) < 0.15
