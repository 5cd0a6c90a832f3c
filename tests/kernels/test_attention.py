"""The gradient of attention in 16 bits on a CPU."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lightning_rlhf.kernels import layers
from lightning_rlhf.kernels.layers import _CausalAttention, fast_sdpa


class Heads(nn.Module):
    """As an attention layer with two query heads to a key head."""

    num_key_value_groups = 2
    is_causal = True


def states(dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value: 2 sequences, 4 heads and 2, 7 tokens of size 8."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, 7, 8, generator=generator).to(dtype) for h in (4, 2, 2)]


def gradients(states: list[Tensor], mask: Tensor | None, *, ours: bool) -> list[Tensor]:
    states = [x.clone().requires_grad_() for x in states]
    attend = fast_sdpa if ours else sdpa_attention_forward
    output, _ = attend(Heads(), *states, mask)
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    output.backward(slope.to(output.dtype))
    return [output.detach(), *(x.grad for x in states if x.grad is not None)]


MASKS = {
    "boolean": torch.ones(7, 7, dtype=torch.bool).tril()[None, None],
    "additive": torch.full((7, 7), -torch.inf, dtype=torch.bfloat16).triu(1)[None, None],
}


def exactly(states: list[Tensor]) -> list[Tensor]:
    """What `gradients` are in float64."""
    query, key, value = (x.double().requires_grad_() for x in states)
    wide = (x.repeat_interleave(2, dim=1) for x in (key, value))
    output = F.scaled_dot_product_attention(query, *wide, is_causal=True).transpose(1, 2)
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    output.backward(slope.double())
    return [output.detach(), *(x.grad for x in (query, key, value) if x.grad is not None)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_in_bf16_long_rows_and_masked_ones_are_fp32_rounded_once(
    mask: str | None, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "SHORT", 0)
    narrow = states(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = gradients(narrow, MASKS[mask] if mask else None, ours=True)
    assert torch.equal(found[0], exactly(narrow)[0].bfloat16())
    exact = gradients([x.float() for x in narrow], None, ours=False)
    for narrow_gradient, gradient in zip(found[1:], exact[1:], strict=True):
        assert narrow_gradient.dtype == torch.bfloat16
        assert torch.equal(narrow_gradient, gradient.bfloat16())


@pytest.mark.parametrize("scores", [2 * 4 * 7 * 7, 2 * 4 * 7 * 7 - 1])
@pytest.mark.parametrize("autocast", [False, True])
def test_in_bf16_short_rows_keep_what_is_looked_at_while_it_fits(
    scores: int, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then output and gradients are as far from the truth as torch's own in bf16, which is slow."""
    monkeypatch.setattr(layers, "SCORES", scores)
    narrow = states(torch.bfloat16)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        patch.object(_CausalAttention, "apply", wraps=_CausalAttention.apply) as asked,
    ):
        found = gradients(narrow, None, ours=True)
    assert asked.call_count == (scores == 2 * 4 * 7 * 7)
    library = gradients(narrow, None, ours=False)
    for ours, theirs, truth in zip(found, library, exactly(narrow), strict=True):
        assert ours.dtype == torch.bfloat16
        assert off(ours, truth) < 1.5 * off(theirs, truth) < 0.01


@pytest.mark.parametrize(
    ("options", "first", "asked"),  # from which query on
    [({"scaling": 0.3}, 0, 1), ({"is_causal": False}, 0, 0), ({"is_causal": False}, 4, 0)],
)
def test_what_short_rows_do_not_know_is_computed_in_fp32(
    options: dict[str, Any], first: int, asked: int
) -> None:
    """Ours is near to the library in fp32."""
    narrow = states(torch.bfloat16)
    narrow[0] = narrow[0][:, :, first:]
    learning = [x.clone().requires_grad_() for x in narrow]
    with patch.object(_CausalAttention, "apply", wraps=_CausalAttention.apply) as spy:
        found, _ = fast_sdpa(Heads(), *learning, None, **options)
    assert spy.call_count == asked
    expected, _ = sdpa_attention_forward(Heads(), *(x.float() for x in narrow), None, **options)
    assert off(found.detach(), expected.double()) < 0.01
    found.sum().backward()
    assert [x.grad.shape for x in learning if x.grad is not None] == [x.shape for x in narrow]


def off(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def test_the_gradient_of_short_rows_is_the_formulas() -> None:
    """In fp32, where nothing is rounded: softmax(scale Q K^T) V by autograd."""
    query, key, value = (x.requires_grad_() for x in states(torch.float32))
    dy = torch.randn(query.shape, generator=torch.Generator().manual_seed(1))
    found = _CausalAttention.apply(query, key, value, 0.3)
    wide = (x.repeat_interleave(2, dim=1) for x in (key, value))
    expected = F.scaled_dot_product_attention(query, *wide, is_causal=True, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    learned = query, key, value
    for ours, plain in zip(
        torch.autograd.grad(found, learned, dy),
        torch.autograd.grad(expected, learned, dy),
        strict=True,
    ):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)
