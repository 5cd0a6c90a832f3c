"""Outputs at the wanted positions alone are those of the whole computation."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from lightning_rlhf.kernels import decoder
from lightning_rlhf.models.config import CRITIC, POLICY, LoRASettings
from lightning_rlhf.models.roles import Roles

from .conftest import VOCABULARY, build_model
from .test_layers import FAMILIES, a_policy, outcome, relative

WANTED = {
    name: torch.tensor([[place == "#" for place in row] for row in rows])
    for name, rows in {
        "a response in each row": ("..##....", ".....###", "###....."),
        "with gaps": ("#.#.....", ".#...#.#", "......#."),
        "rows of one length": ("......##", ".......#", "########"),
        "one position in all": ("#.......",),
    }.items()
}


def tokens_of(wanted: Tensor) -> Tensor:
    return torch.arange(wanted.numel()).view(wanted.shape) * 7919 % VOCABULARY


@pytest.mark.parametrize("mask", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_gradients_are_those_of_all_positions(family: str, mask: Tensor) -> None:
    roles = a_policy(family)
    tokens = tokens_of(mask)
    expected, expected_gradient = outcome(roles, roles.hidden(tokens)[mask])
    found, gradient = outcome(roles, roles.hidden_at(tokens, mask))
    assert found.shape == (int(mask.sum()), roles.hidden_size)
    assert relative(found, expected) <= 1e-5
    assert expected_gradient.abs().max() > 0
    assert relative(gradient, expected_gradient) <= 1e-5


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}


def test_rows_are_not_made_longer_than_the_positions_that_a_model_was_trained_on() -> None:
    """Beyond 31 it rotates by other angles."""
    model = build_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=31)
    roles, mask = Roles(model), torch.zeros(3, 31, dtype=torch.bool)
    mask[0, 20:], mask[1, 3:9], mask[2, 30] = True, True, True
    tokens = tokens_of(mask)
    expected = roles.hidden(tokens)[mask]
    assert relative(roles.hidden_at(tokens, mask), expected) <= 1e-5


WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("attention", "shape", "library"), [("sdpa", {}, 0), ("sdpa", WINDOWS, 2), ("eager", {}, 2)]
)
def test_attention_that_ours_does_not_compute_is_left_to_the_library(
    monkeypatch: pytest.MonkeyPatch, attention: str, shape: dict[str, Any], library: int
) -> None:
    """Another implementation, or one whose positions look 4 back alone, by a mask."""
    roles, mask = a_policy("qwen3", **shape), WANTED["a response in each row"]
    if attention == "eager":
        roles.causal_lm.set_attn_implementation(attention)
    tokens = tokens_of(mask)
    asked: list[Any] = []
    forward = Qwen3Attention.forward

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Qwen3Attention, "forward", spy)
    with torch.no_grad():
        found = roles.hidden_at(tokens, mask)
        assert len(asked) == library
        assert relative(found, roles.hidden(tokens)[mask]) <= 1e-5


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize(("multiple", "inner", "last"), [(1, 15, 8), (7, 21, 14)])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_only_real_positions_go_through_the_layers_and_only_wanted_ones_through_the_last(
    monkeypatch: pytest.MonkeyPatch, family: str, multiple: int, inner: int, last: int
) -> None:
    """4 + 8 + 3 real positions and 2 + 3 + 3 wanted ones, rounded up."""
    monkeypatch.setattr(decoder, "MULTIPLE", multiple)
    roles = a_policy(family, num_hidden_layers=4)
    mask = WANTED["a response in each row"]
    tokens = tokens_of(mask)
    expected, expected_gradient = outcome(roles, roles.hidden(tokens)[mask])
    seen: list[int] = []
    for layer in roles.causal_lm.base_model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1].numel()))
    found, gradient = outcome(roles, roles.hidden_at(tokens, mask))
    assert seen == [inner, inner, inner, last]
    assert relative(found, expected) <= 1e-5
    assert relative(gradient, expected_gradient) <= 1e-5


@pytest.mark.parametrize(
    ("dtype", "library", "autocast", "inner"),
    # 8 + 70 real positions of 2 x 70, 39 of them wanted; of few shapes of 2 x 80.
    [
        (torch.float32, "by_torch", False, 96),
        (torch.bfloat16, "by_torch", False, 128),
        (torch.float32, "by_torch", True, 128),
    ],
)
def test_products_that_are_compiled_for_a_shape_have_few(
    dtype: torch.dtype, library: str, autocast: bool, inner: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(library)
    roles, exact = (Roles(build_model("qwen3").to(dtype).to(d)) for d in (dtype, torch.double))
    mask = torch.zeros(2, 70, dtype=torch.bool)
    mask[0, 4:8], mask[1, 35:] = True, True
    tokens = tokens_of(mask)
    seen: list[int] = []
    for layer in roles.causal_lm.base_model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1].numel()))
    columns: list[int] = []
    roles.causal_lm.base_model.layers[0].register_forward_pre_hook(
        lambda _, args: columns.append(args[0].shape[1])
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = roles.hidden_at(tokens, mask)
        assert seen == [inner, 64]
        assert columns == [70 if inner == 96 else 80]
        plain = roles.hidden(tokens)[mask]
    with torch.no_grad():
        truth = exact.hidden(tokens)[mask]
    assert relative(found.double(), truth) <= max(1e-5, 1.2 * relative(plain.double(), truth))


@pytest.mark.parametrize("family", ["qwen3_5_text"])
def test_recomputed_layers_have_the_same_outputs_and_gradients(family: str) -> None:
    """Bit for bit: it is the same computation."""
    roles, mask = a_policy(family), WANTED["a response in each row"]
    tokens = tokens_of(mask)
    expected, expected_gradient = outcome(roles, roles.hidden_at(tokens, mask))
    roles.recompute_layers()
    found, gradient = outcome(roles, roles.hidden_at(tokens, mask))
    assert torch.equal(found, expected)
    assert torch.equal(gradient, expected_gradient)


def test_they_are_computed_once_more_as_the_role_that_they_were_computed_as() -> None:
    """The gradient is computed when another role is active again."""
    mask = WANTED["a response in each row"]
    tokens = tokens_of(mask)

    def gradient(*, again: bool) -> Tensor:
        roles = a_policy("qwen3")
        roles.add_adapter(CRITIC, LoRASettings(r=4, alpha=8, target_modules="all-linear"), seed=1)
        if again:
            roles.recompute_layers()
        roles.set_role(POLICY)
        with roles.use_role(CRITIC):
            hidden = roles.hidden_at(tokens, mask)
        hidden.square().sum().backward()
        assert all(p.grad is None for p in roles.trained_by(POLICY))
        return torch.cat([p.grad.flatten() for p in roles.trained_by(CRITIC)])

    expected = gradient(again=False)
    assert expected.abs().max() > 0
    assert torch.equal(gradient(again=True), expected)


def test_what_goes_into_a_layer_is_all_that_is_kept() -> None:
    """Bytes that autograd saves: with it those of the layers' inputs, and no product of theirs."""
    mask = torch.zeros(4, 40, dtype=torch.bool)
    mask[:, 20:] = True
    tokens = tokens_of(mask)
    saved = {}
    for again in (False, True):
        roles = a_policy("qwen3", num_hidden_layers=6)
        if again:
            roles.recompute_layers()
        seen: dict[int, int] = {}

        def keep(x: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            hidden = roles.hidden_at(tokens, mask)
        saved[again] = sum(seen.values())
        del hidden
    inputs = 6 * 4 * 40 * 32 * 4  # layers x positions x width x bytes
    assert saved[True] < 2 * inputs
    assert saved[False] > 10 * inputs
