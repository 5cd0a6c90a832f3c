"""A product is the sum that it stands for, however its weight is laid out."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_rlhf.kernels import lora as product
from lightning_rlhf.kernels.lora import JointLinear
from lightning_rlhf.kernels.patch import patch_layers

LAYOUTS = pytest.mark.parametrize("smallest", [0, 2**30], ids=["packed", "plain"])


class Three(nn.Module):
    """Of one input; the last has no adapter."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, width, bias=bias) for width in (12, 5, 40))


def layers(bias: bool, adapted: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    three: nn.Module = Three(bias)
    if adapted:
        config = LoraConfig(r=2, lora_alpha=6, target_modules=["a", "b"], init_lora_weights=False)
        three = get_peft_model(three, config).base_model.model  # type: ignore[arg-type]
        patch_layers(three)
    return [three.a, three.b, three.c]  # type: ignore[list-item]


def expected(of: list[nn.Module], x: Tensor) -> Tensor:
    """Layer by layer, in float64."""
    return torch.cat([layer.double()(x.double()) for layer in of], dim=1).float()


@LAYOUTS
@pytest.mark.parametrize(("rows", "adapted", "bias"), [
    (1, True, True), (40, True, False), (40, False, True), (1, False, False),
])  # fmt: skip
@torch.no_grad()
def test_it_is_the_layers_side_by_side(
    monkeypatch: pytest.MonkeyPatch, smallest: int, rows: int, adapted: bool, bias: bool
) -> None:
    monkeypatch.setattr(product, "SMALLEST", smallest)
    of = layers(bias, adapted)
    joint, one = JointLinear(*of), JointLinear(of[0])  # type: ignore[arg-type]
    assert joint.weight.packed == (smallest == 0)
    x, onto = torch.randn(rows, 16), torch.randn(rows, 57)
    before = x.clone(), onto.clone()
    side_by_side = expected(of, x)
    torch.testing.assert_close(joint(x), side_by_side, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joint(x, onto=onto), onto + side_by_side, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one(x), side_by_side[:, :12], rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(onto, before[1])


@torch.no_grad()
def test_a_plain_layout_goes_to_onednn_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, by_onednn: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(product, "SMALLEST", 2**30)
    of = layers(bias=True, adapted=True)
    joint = JointLinear(*of)  # type: ignore[arg-type]
    x, onto = torch.randn(40, 16), torch.randn(40, 57)
    found = joint(x), joint(x, onto=onto)
    assert by_onednn == [(40, 16), (40, 20), (40, 16), (40, 20)]
    side_by_side = expected(of, x)
    torch.testing.assert_close(found[0], side_by_side, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], onto + side_by_side, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_torch_without_the_operators_multiplies_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "SMALLEST", 0)
    monkeypatch.setattr(product, "OPERATORS", (*product.OPERATORS, "_renamed"))
    of = layers(bias=True, adapted=False)
    x = torch.randn(3, 16)
    plain = JointLinear(*of)  # type: ignore[arg-type]
    assert not plain.weight.packed
    torch.testing.assert_close(plain(x), expected(of, x), rtol=1e-5, atol=1e-5)
