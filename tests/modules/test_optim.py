"""The optimizer, its schedules and the one step that all stages take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_rlhf.core.config import SFTConfig
from lightning_rlhf.modules.optim import (
    advance_schedule,
    backward,
    build_optimizer,
    clip_gradients,
    lr_factor,
    step,
    trainable_state,
    zero_gradients,
)

from .conftest import close, parameters, sft_config, within_fit


def factors(total: int, **changes: object) -> list[float]:
    return [lr_factor(step, total, sft_config(**changes)) for step in range(total + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        # 1 - step / 4
        ("linear", [1, 0.75, 0.5, 0.25, 0]),
        # (1 + cos(pi step / 4)) / 2, cos(pi / 4) = 0.70710678
        ("cosine", [1, 0.85355339, 0.5, 0.14644661, 0]),
    ],
)
def test_schedules_by_hand(schedule: str, expected: list[float]) -> None:
    assert factors(4, lr_schedule=schedule) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [1, 0.85355339, 0.5, 0.14644661, 0]),
    ],
)
def test_warm_up_by_hand(schedule: str, after: list[float]) -> None:
    # Half of 8 steps climb by fifths: the first step is not wasted on a rate of 0, and the fifth
    # stands at the peak. What follows is the schedule over the 4 steps that are left.
    found = factors(8, lr_schedule=schedule, warmup_fraction=0.5)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, *after], abs=1e-8)


def test_part_of_a_step_of_warm_up() -> None:
    # 0.3 of 5 steps are 1.5: steps 0 and 1 stand at 1/2.5 and 2/2.5; from step 2 on 3.5 are left.
    found = factors(5, lr_schedule="linear", warmup_fraction=0.3)
    expected = [0.4, 0.8, *[1 - (step - 1.5) / 3.5 for step in (2, 3, 4)], 0]
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.3, 0.99])
@pytest.mark.parametrize("total", [1, 2, 7, 100])
def test_every_schedule_climbs_once_and_stays_within_0_and_1(
    schedule: str, warmup: float, total: int
) -> None:
    found = factors(total, lr_schedule=schedule, warmup_fraction=warmup)
    peak = found.index(max(found))
    assert found[:peak] == sorted(found[:peak])
    assert found[peak:] == sorted(found[peak:], reverse=True)
    assert all(0 <= factor <= 1 for factor in found)
    assert all(factor > 0 for factor in found[:total])
    beyond = lr_factor(3 * total, total, sft_config(lr_schedule=schedule, warmup_fraction=warmup))
    assert beyond == pytest.approx(1 if schedule == "constant" else 0, abs=1e-12)


def build(config: SFTConfig, total_steps: int, *groups: tuple[float, nn.Module]) -> dict[str, Any]:
    """`build_optimizer` for pairs of a learning-rate factor and a module."""
    found = [(factor, part.parameters()) for factor, part in groups]
    return build_optimizer(found, config, total_steps)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_weight_decay_is_for_matrices_and_frozen_weights_are_left_out() -> None:
    net, head = Net(), nn.Linear(2, 1)
    config = sft_config(lr=0.1, weight_decay=0.3, adam_beta2=0.9, adam_eps=1e-4)
    optimizer = build(config, 10, (1.0, net), (5.0, head))["optimizer"]
    found = {
        id(p): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert found == {
        id(net.linear.weight): (0.1, 0.3),
        id(net.linear.bias): (0.1, 0.0),
        id(net.norm.weight): (0.1, 0.0),
        id(net.norm.bias): (0.1, 0.0),
        id(head.weight): (0.5, 0.3),
        id(head.bias): (0.5, 0.0),
    }
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.9)}
    assert {group["eps"] for group in optimizer.param_groups} == {1e-4}


def test_decay_shrinks_a_matrix_whose_gradient_is_zero() -> None:
    # AdamW: w <- w (1 - lr * decay) = 0.97 w; the bias stays.
    head = nn.Linear(2, 1)
    config = sft_config(lr=0.1, weight_decay=0.3)
    optimizer = build(config, 10, (1.0, head))["optimizer"]
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    head(torch.zeros(1, 2)).mul(0).sum().backward()
    optimizer.step()
    close(head.weight.detach(), 0.97 * weight)
    assert torch.equal(head.bias.detach(), bias)


def test_every_group_follows_the_schedule() -> None:
    net, head = nn.Linear(2, 2), nn.Linear(2, 1)
    config = sft_config(lr=0.1, lr_schedule="linear")
    built = build(config, 4, (1.0, net), (5.0, head))
    optimizer, scheduler = built["optimizer"], built["lr_scheduler"]
    for remaining in (1, 0.75, 0.5, 0.25):
        rates = sorted({round(group["lr"], 9) for group in optimizer.param_groups})
        assert rates == pytest.approx([0.1 * remaining, 0.5 * remaining])
        optimizer.step()
        scheduler.step()


class Slope(L.LightningModule):
    """One vector under plain gradient descent: what moves it is its gradient, times 1/2."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.w = nn.Parameter(torch.tensor([10.0, 20.0]))

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        halving = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": halving}

    def losses(self, *slopes: tuple[float, float]) -> Iterator[Tensor]:
        for slope in slopes:
            yield self.w @ torch.tensor(slope, dtype=torch.float32)


def backward_and_step(
    module: Slope, losses: Iterator[Tensor], max_grad_norm: float
) -> tuple[Tensor, Tensor]:
    zero_gradients(module)
    total = torch.stack([backward(module, loss) for loss in losses]).sum()
    norm = clip_gradients(module, max_grad_norm)
    step(module)
    return total, norm


def test_a_long_gradient_is_cut_to_the_limit() -> None:
    # Gradient (3, 4) of length 5, limit 1: the step is 1/2 (0.6, 0.8). Loss 3 * 10 + 4 * 20.
    module = Slope()
    total, norm = within_fit(module, lambda: backward_and_step(module, module.losses((3, 4)), 1.0))
    assert total.item() == 110
    assert norm.item() == pytest.approx(5)
    close(module.w.detach(), torch.tensor([10 - 0.3, 20 - 0.4]))
    assert total.ndim == norm.ndim == 0


def test_a_short_gradient_is_not_lengthened() -> None:
    module = Slope()
    _, norm = within_fit(module, lambda: backward_and_step(module, module.losses((3, 4)), 100.0))
    assert norm.item() == pytest.approx(5)
    close(module.w.detach(), torch.tensor([10 - 1.5, 20 - 2.0]))


def test_several_losses_make_one_step_on_their_sum() -> None:
    # (1, 0) + (2, 4) = (3, 4): cut once, after the sum, and all read before the weights move.
    module = Slope()
    losses = module.losses((1, 0), (2, 4))
    total, norm = within_fit(module, lambda: backward_and_step(module, losses, 1.0))
    assert total.item() == 10 + 20 + 80
    assert not total.requires_grad
    assert norm.item() == pytest.approx(5)
    close(module.w.detach(), torch.tensor([10 - 0.3, 20 - 0.4]))


def test_a_step_forgets_the_gradient_of_the_one_before() -> None:
    module = Slope()

    def twice() -> None:
        backward_and_step(module, module.losses((8, 0)), 100.0)
        backward_and_step(module, module.losses((0, 4)), 100.0)

    within_fit(module, twice)
    close(module.w.detach(), torch.tensor([10 - 4.0, 20 - 2.0]))


def test_what_is_computed_in_fp32_has_a_gradient_in_fp32() -> None:
    """A head of values under bf16 autocast. bf16 has 8 binary digits: 1 + 2^-12 is 1 there."""
    module = Slope()
    module.head = nn.Linear(2, 1, bias=False)
    hidden = torch.tensor([[1 + 2**-12, 1.0], [2.0, -1.0]])

    def work() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                loss = module.head(hidden).sum()
            backward(module, loss)
        return module.head.weight.grad

    assert within_fit(module, work).tolist() == [[3 + 2**-12, 0.0]]


def test_the_schedule_moves_when_advanced() -> None:
    # Rates 1/2, 1/2 (two steps of one iteration), then 1/4.
    module = Slope()

    def two_iterations() -> None:
        for _ in range(2):
            backward_and_step(module, module.losses((4, 0)), 100.0)
        advance_schedule(module)
        backward_and_step(module, module.losses((4, 0)), 100.0)

    within_fit(module, two_iterations)
    close(module.w.detach(), torch.tensor([10 - 2.0 - 2.0 - 1.0, 20.0]))


def test_trainable_state_is_what_has_a_gradient() -> None:
    net = Net()
    state = trainable_state(net)
    assert set(state) == {"linear.weight", "linear.bias", "norm.weight", "norm.bias"}
    assert all(torch.equal(state[name], parameters(net)[name]) for name in state)
