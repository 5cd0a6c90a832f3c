"""Which library multiplies, its results, and which products are compiled for their shapes."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_rlhf.kernels import lora
from lightning_rlhf.kernels.layers import linear, product
from lightning_rlhf.kernels.lora import JointLinear
from lightning_rlhf.kernels.patch import patch_layers


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.usefixtures("by_onednn")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 7), (7, 5, 3), (1, 1, 1)])
def test_onednn_computes_the_formula(
    shape: tuple[int, int, int], turned: bool, to_onednn: list[tuple[int, ...]]
) -> None:
    """Of matrices that lie row by row, and column by column as those of a gradient do."""
    n, i, o = shape
    x, weight, bias = numbers(n, i), numbers(o, i), numbers(o)
    if turned:
        x, weight = x.T.contiguous().T, weight.T.contiguous().T
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(linear(x, weight, bias).double(), exact + bias, rtol=0, atol=1e-5)
    torch.testing.assert_close(product(x, weight.T).double(), exact, rtol=0, atol=1e-5)
    assert len(to_onednn) == 2


# Several layers of one input as one product


LAYOUTS = pytest.mark.parametrize("smallest", [0, 2**30], ids=["packed", "plain"])


class Three(nn.Module):
    """Of one input; the last has no adapter."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, width, bias=bias) for width in (12, 5, 40))


def three_layers(bias: bool, adapted: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    three: nn.Module = Three(bias)
    if adapted:
        config = LoraConfig(r=2, lora_alpha=6, target_modules=["a", "b"], init_lora_weights=False)
        three = get_peft_model(three, config).base_model.model  # type: ignore[arg-type]
        patch_layers(three)
    return [three.a, three.b, three.c]  # type: ignore[list-item]


@LAYOUTS
@pytest.mark.parametrize(("rows", "adapted", "bias"), [
    (1, True, True), (40, True, False), (40, False, True), (1, False, False),
])  # fmt: skip
@torch.no_grad()
def test_it_is_the_layers_side_by_side(
    monkeypatch: pytest.MonkeyPatch, smallest: int, rows: int, adapted: bool, bias: bool
) -> None:
    monkeypatch.setattr(lora, "SMALLEST", smallest)
    of = three_layers(bias, adapted)
    joint, one = JointLinear(*of), JointLinear(of[0])  # type: ignore[arg-type]
    assert joint.weight.packed == (smallest == 0)
    x, onto = torch.randn(rows, 16), torch.randn(rows, 57)
    before = x.clone(), onto.clone()
    side_by_side = torch.cat([layer.double()(x.double()) for layer in of], dim=1).float()
    torch.testing.assert_close(joint(x), side_by_side, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joint(x, onto=onto), onto + side_by_side, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one(x), side_by_side[:, :12], rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(onto, before[1])
