"""Our layers have the outputs and gradients of those of transformers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5 import modeling_qwen3_5

from lightning_rlhf.kernels.layers import (
    FastLayer,
    OneDNNLinear,
    _LinearFunction,
    _RMSNormFunction,
    fast_class,
    library_class,
)
from lightning_rlhf.kernels.lora import FusedLoRALinear
from lightning_rlhf.models.config import POLICY, LoRASettings
from lightning_rlhf.models.roles import Roles

from .conftest import VOCABULARY, build_model

FAMILIES = ("qwen3", "qwen3_5_text")
NORMS = [Qwen3RMSNorm, modeling_qwen3_5.Qwen3_5RMSNorm]
WIDTH = 12


def a_policy(family: str, **changes: Any) -> Roles:
    roles = Roles(build_model(family, **changes))
    roles.add_adapter(POLICY, LoRASettings(r=4, alpha=8, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in roles.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return roles


@contextmanager
def plain(roles: Roles) -> Iterator[None]:
    """Inside, transformers computes all its layers."""
    layers = roles.modules()
    ours = [m for m in layers if isinstance(m, FastLayer) and not isinstance(m, FusedLoRALinear)]
    classes = [type(module) for module in ours]
    assert ours
    for module in ours:
        module.__class__ = library_class(module)
    try:
        yield
    finally:
        for module, kind in zip(ours, classes, strict=True):
            module.__class__ = kind


def outcome(roles: Roles, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states, and the gradient of a weighted sum of them."""
    roles.zero_grad()
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    (hidden * weights).sum().backward()
    return hidden.detach(), torch.cat([p.grad.flatten() for p in roles.trained_by(POLICY)])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("library", ["", "by_onednn"])
@pytest.mark.parametrize("length", [1, 90])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_gradients_are_those_of_transformers(
    family: str, length: int, library: str, request: pytest.FixtureRequest
) -> None:
    asked = request.getfixturevalue(library) if library else None
    roles = a_policy(family)
    tokens = torch.arange(2 * length).view(2, length) * 7919 % VOCABULARY
    if asked is not None:
        asked.clear()
    hidden, gradient = outcome(roles, roles.hidden(tokens))
    assert (
        asked is None or len(asked) > len(list(roles.trained_by(POLICY))) / 2
    )  # not forwards alone
    with plain(roles):
        expected, expected_gradient = outcome(roles, roles.hidden(tokens))
    assert relative(hidden, expected) <= 1e-5
    assert expected_gradient.abs().max() > 0
    assert relative(gradient, expected_gradient) <= 1e-5


def a_norm(kind: type[nn.Module], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Ours and the library's, with the same frozen weights."""
    generator = torch.Generator().manual_seed(0)
    pair = fast_class(kind)(WIDTH), kind(WIDTH)
    weight = torch.randn(WIDTH, generator=generator)
    for norm in pair:
        norm.requires_grad_(False).weight.copy_(weight)
        norm.to(dtype)
    return pair


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(norm: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The output of a norm, and its gradient."""
    x = x.clone().requires_grad_()
    y = norm(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def exactly(norm: Any) -> Callable[[Tensor], Tensor]:
    """The formula in float64: w x / sqrt(mean(x^2) + eps), of Qwen3.5 with 1 + w for w."""
    zero_centred = hasattr(norm, "eps")
    eps = norm.eps if zero_centred else norm.variance_epsilon
    weight = norm.weight.double() + zero_centred
    return lambda x: weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("kind", NORMS)
def test_in_bf16_a_norm_is_rounded_once_and_its_gradient_is_no_further_from_the_truth(
    kind: type[nn.Module],
) -> None:
    ours, library = a_norm(kind, torch.bfloat16)
    off, rounded_twice = [0.0, 0.0], False
    for seed in range(24):
        x, dy = (numbers(4, WIDTH, seed=s).bfloat16() for s in (2 * seed, 2 * seed + 1))
        exact, truth = both(exactly(ours), x.double(), dy.double())
        (y, dx), (plain_y, plain_dx) = both(ours, x, dy), both(library, x, dy)
        assert is_rounded_once(y, exact)
        rounded_twice |= not is_rounded_once(plain_y, exact)
        assert dx.dtype == torch.bfloat16
        for i, found in enumerate((dx, plain_dx)):
            off[i] += relative(found, truth) / 24
    assert off[0] < 1.05 * off[1] < 0.02
    assert rounded_twice == (kind is not modeling_qwen3_5.Qwen3_5RMSNorm)


def is_rounded_once(found: Tensor, exact: Tensor) -> bool:
    """Whether bf16, of 8 digits, is off by half of the last at most, and fp32's own rounding."""
    half = 2.0 ** (exact.abs().log2().floor() - 8)
    return bool(((found.double() - exact).abs() <= 1.001 * half).all())


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_learns_its_weight_too(kind: type[nn.Module]) -> None:
    """As the formula in float64 does; and it has the same bits as one that is not trained."""
    ours, _ = a_norm(kind)
    x, dy = numbers(5, 3, WIDTH), numbers(5, 3, WIDTH, seed=2)
    x[0] *= 1e-3  # where eps counts
    frozen = ours(x)
    ours.requires_grad_()
    with patch.object(_RMSNormFunction, "apply", wraps=_RMSNormFunction.apply) as asked:
        y, dx, dw = learned(ours, x, dy)
    assert asked.call_count == 1
    assert torch.equal(y, frozen)
    assert relative(y, exactly(ours)(x.double())) <= 1e-6
    weight = ours.weight.detach().double().requires_grad_()
    wide = x.double().requires_grad_()
    zero_centred = hasattr(ours, "eps")
    eps = ours.eps if zero_centred else ours.variance_epsilon
    exact = (weight + zero_centred) * wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    expected = torch.autograd.grad(exact, (wide, weight), dy.double())
    assert relative(dx[0], expected[0][0]) <= 1e-6
    assert relative(dx[1:], expected[0][1:]) <= 1e-6
    assert relative(dw, expected[1]) <= 1e-6


def learned(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output of a layer, and the gradients of x and of its parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *learns(layer)], dy)]


def learns(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer.parameters() if p.requires_grad]


@pytest.mark.usefixtures("by_onednn")
@pytest.mark.parametrize(("shape", "bias", "frozen"), [
    ((2, 3, 4), True, ()), ((4,), False, ()), ((2, 3, 4), True, ("weight", "bias")),
])  # fmt: skip
def test_a_projection_by_onednn_has_outputs_and_gradients_of_the_formula(
    shape: tuple[int, ...], bias: bool, frozen: tuple[str, ...]
) -> None:
    plain = nn.Linear(4, 6, bias=bias)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name not in frozen)
    ours = deepcopy(plain)
    ours.__class__ = OneDNNLinear
    x, dy = numbers(*shape), numbers(*shape[:-1], 6, seed=2)
    with patch.object(_LinearFunction, "apply", wraps=_LinearFunction.apply) as asked:
        found = learned(ours, x, dy)
    assert asked.call_count == 1
    expected = learned(plain.double(), x.double(), dy.double())
    assert len(found) == 2 + len(learns(plain))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)
