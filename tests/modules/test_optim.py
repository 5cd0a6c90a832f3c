"""The optimizer, its schedules and the one step that all stages take."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_rlhf.modules.optim import MuonAdamW, build_with, lr_factor
from lightning_rlhf.modules.supervised import SFTModule

from .conftest import sft_config, sft_roles, within_fit


def factors(total: int, **changes: object) -> list[float]:
    return [lr_factor(step, total, sft_config(**changes)) for step in range(total + 1)]


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        # 1 - step / 4
        ("linear", [1, 0.75, 0.5, 0.25, 0]),
        # (1 + cos(pi step / 4)) / 2, cos(pi / 4) = 0.70710678
        ("cosine", [1, 0.85355339, 0.5, 0.14644661, 0]),
    ],
)
def test_schedules_by_hand(schedule: str, after: list[float]) -> None:
    assert factors(4, lr_schedule=schedule) == pytest.approx(after, abs=1e-8)
    # Half of 8 steps climb by fifths: the first step is not wasted on a rate of 0, and the fifth
    # stands at the peak. What follows is the schedule over the 4 steps that are left.
    found = factors(8, lr_schedule=schedule, warmup_fraction=0.5)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, *after], abs=1e-8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_weight_decay_is_for_matrices_and_frozen_weights_are_left_out() -> None:
    net, head = Net(), nn.Linear(2, 1)
    config = sft_config(lr=0.1, weight_decay=0.3, adam_beta2=0.9, adam_eps=1e-4)
    groups = [(1.0, net.parameters()), (5.0, head.parameters())]
    module = SFTModule(sft_roles("qwen3"), config)
    optimizer = module.build_optimizer(groups, 10)["optimizer"]
    found = {
        id(p): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert found == {
        id(net.linear.weight): (0.1, 0.3), id(net.linear.bias): (0.1, 0.0),
        id(net.norm.weight): (0.1, 0.0), id(net.norm.bias): (0.1, 0.0), id(head.weight): (0.5, 0.3),
        id(head.bias): (0.5, 0.0),
    }  # fmt: skip
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.9)}
    assert {group["eps"] for group in optimizer.param_groups} == {1e-4}
    for given in ({}, {"foreach": True}):  # torch refuses both
        made = build_with(
            partial(torch.optim.AdamW, **given), [*optimizer.param_groups], config, ()
        )
        assert made.defaults["fused"] == (not given)
    # Of a gradient of 0 a step leaves (1 - lr * decay) of a matrix, 0.85, and all of a bias.
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    head(torch.zeros(1, 2)).mul(0).sum().backward()
    optimizer.step()
    torch.testing.assert_close(head.weight.detach(), 0.85 * weight)
    assert torch.equal(head.bias.detach(), bias)


def test_muon_moves_the_matrices_of_layers_and_adamw_all_others() -> None:
    """Each as torch's own does, by the schedule that both share; embeddings are matrices too."""
    decayed = {"lr": 0.1, "weight_decay": 0.3}
    config = sft_config(**decayed, adam_beta2=0.9, adam_eps=1e-4, lr_schedule="linear")
    models = [sft_roles("qwen3").requires_grad_(True) for _ in range(2)]
    module = SFTModule(models[0], config)
    module.optimizer_class = partial(MuonAdamW, momentum=0.8)
    built = module.build_optimizer([(1.0, module.parameters())], 4)
    named = list(models[1].named_parameters())
    matrices = [p for name, p in named if ".layers." in name and p.ndim == 2]
    rest = [
        {"params": [p for name, p in named if "embed_tokens" in name], **decayed},
        {"params": [p for _, p in named if p.ndim == 1], **decayed, "weight_decay": 0.0},
    ]
    assert len(matrices) + sum(len(group["params"]) for group in rest) == len(named)
    theirs = (torch.optim.Muon([{"params": matrices, **decayed}], momentum=0.8),
              torch.optim.AdamW(rest, betas=(0.9, 0.9), eps=1e-4, fused=True))  # fmt: skip
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for pair in zip(*(model.parameters() for model in models), strict=True):
            pair[0].grad = torch.randn(pair[0].shape, generator=generator)
            pair[1].grad = pair[0].grad.clone()
        for one in theirs:
            for group in one.param_groups:
                group["lr"] = 0.1 * (1 - step / 4)
        for one in (built["optimizer"], *theirs):
            one.step()
        built["lr_scheduler"]["scheduler"].step()
    for ours, expected in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, expected)


def test_what_is_computed_in_fp32_has_a_gradient_in_fp32() -> None:
    """A head of values under bf16 autocast. bf16 has 8 binary digits: 1 + 2^-12 is 1 there."""
    module = SFTModule(sft_roles("qwen3"), sft_config())
    module.head = nn.Linear(2, 1, bias=False)
    hidden = torch.tensor([[1 + 2**-12, 1.0], [2.0, -1.0]])

    def work() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                loss = module.head(hidden).sum()
            module.add_gradient(loss)
        return module.head.weight.grad

    assert within_fit(module, work).tolist() == [[3 + 2**-12, 0.0]]
