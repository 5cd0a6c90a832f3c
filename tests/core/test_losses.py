"""The critic's loss and those of pairs: cases by hand, and the sign and size of the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.losses import bradley_terry_loss, centering_loss, value_loss

from .conftest import close, drawn

sizes_and_seeds = st.tuples(st.integers(1, 20), st.integers(0, 2**20))


def draw(size_and_seed: tuple[int, int], count: int) -> Tensor:
    size, seed = size_and_seed
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, generator=generator, dtype=torch.float64)


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=True)


# clip_range_vf 1/2 about an old value of 0. The slope in V is V - R where the plain error is the
# larger, else 0.
@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        (0.25, 1, 9 / 32, -0.75),  # inside: 1/2 (3/4)^2
        (2, 3, 25 / 8, 0.0),  # went up too far, the target is further: 1/2 (1/2 - 3)^2
        (-2, -3, 25 / 8, 0.0),  # the same, downwards
        (2, 0, 2.0, 2.0),  # went up too far and past the target: pulled back, 1/2 2^2
        (2, -1, 9 / 2, 3.0),
        (0, 0, 0.0, 0.0),
    ],
)
def test_value_loss_by_hand(value: float, target: float, loss: float, slope: float) -> None:
    values = leaf(value)
    old, returns = leaf(0.0).detach(), leaf(target).detach()
    found = value_loss(values, old, returns, clip_range_vf=0.5)
    close(found, torch.tensor([loss], dtype=torch.float64))
    found.sum().backward()
    close(values.grad, torch.tensor([slope], dtype=torch.float64))


@drawn
@given(sizes_and_seeds, st.floats(0.05, 3))
def test_value_loss_is_the_larger_of_two_squares(
    drawn_: tuple[int, int], clip_range_vf: float
) -> None:
    new, old, returns = draw(drawn_, 3)
    values = new.clone().requires_grad_()
    loss = value_loss(values, old, returns, clip_range_vf=clip_range_vf)
    loss.sum().backward()
    for i, (v, o, r) in enumerate(zip(new.tolist(), old.tolist(), returns.tolist(), strict=True)):
        kept = max(o - clip_range_vf, min(o + clip_range_vf, v))
        plain, bounded = (v - r) ** 2 / 2, (kept - r) ** 2 / 2
        assert loss[i].item() == pytest.approx(max(plain, bounded), rel=1e-12)
        slope = v - r if plain >= bounded else 0.0
        assert values.grad[i].item() == pytest.approx(slope, rel=1e-12)


def test_a_wide_value_clip_is_half_the_squared_error() -> None:
    new, old, returns = draw((50, 3), 3)
    close(value_loss(new, old, returns, clip_range_vf=1e6), 0.5 * (new - returns) ** 2)


def test_without_a_clip_the_old_value_has_no_say() -> None:
    # (1/2 3^2, 1/2 (-1)^2), slope V - R.
    values = leaf(2.0, -3.0)
    returns, old = leaf(-1.0, -2.0).detach(), leaf(math.nan, 50.0).detach()
    loss = value_loss(values, old, returns, clip_range_vf=None)
    assert loss.tolist() == [4.5, 0.5]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [3, -1]


def test_centering_by_hand() -> None:
    # (1 + 2)^2 = 9, (1 - 1)^2 = 0, (-3 + 1)^2 = 4; slope 2 (chosen + rejected) on either side.
    chosen = torch.tensor([1.0, 1.0, -3.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([2.0, -1.0, 1.0], dtype=torch.float64, requires_grad=True)
    loss = centering_loss(chosen, rejected)
    assert loss.tolist() == [9, 0, 4]
    loss.sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.tolist() == rejected.grad.tolist() == [6, 0, -4]


def test_bradley_terry_at_a_tie_is_log_2() -> None:
    tie = leaf(-3.0, 0.0, 12.5).detach()
    close(bradley_terry_loss(tie, tie), torch.full((3,), math.log(2), dtype=torch.float64))


def test_bradley_terry_by_hand() -> None:
    # A margin of ln 3 wins with probability 3/4: loss ln 4/3; its slope is the 1/4 that is missing.
    # A margin of -ln 3 wins with 1/4: loss ln 4, slope 3/4.
    chosen, rejected = leaf(5 + math.log(3), 5.0), leaf(5.0, 5 + math.log(3))
    loss = bradley_terry_loss(chosen, rejected)
    close(loss, torch.tensor([math.log(4 / 3), math.log(4)], dtype=torch.float64))
    loss.sum().backward()
    close(chosen.grad, torch.tensor([-1 / 4, -3 / 4], dtype=torch.float64))
    close(rejected.grad, torch.tensor([1 / 4, 3 / 4], dtype=torch.float64))


@drawn
@given(sizes_and_seeds, st.floats(-50, 50))
def test_bradley_terry_identities(drawn_: tuple[int, int], offset: float) -> None:
    chosen, rejected = draw(drawn_, 2)
    loss = bradley_terry_loss(chosen, rejected)
    close(loss, (1 + (rejected - chosen).exp()).log())
    close(bradley_terry_loss(chosen + offset, rejected + offset), loss, rtol=1e-8)
    # -log s(m) + log s(-m) = -m
    close(loss - bradley_terry_loss(rejected, chosen), rejected - chosen)


def test_bradley_terry_far_from_a_tie_stays_finite() -> None:
    # -log sigmoid(-1000) = 1000 and -log sigmoid(1000) = 0 to every digit a float has.
    chosen, rejected = torch.tensor([0.0, 1000.0]), torch.tensor([1000.0, 0.0])
    assert bradley_terry_loss(chosen, rejected).tolist() == [1000, 0]
