"""Losses of the critic and of pairs: cases by hand, and the sign and size of the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.losses import (
    bradley_terry_loss,
    centering_loss,
    preference_loss,
    value_loss,
)

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


# sigmoid(ln 3) = 3/4: a pair that leads by ln 3 wins with probability 3/4, one behind by it with
# 1/4. A margin is taken off the lead. With one label in ten believed to be wrong the loss is
# 0.9 ln 4/3 + 0.1 ln 4, its slope sigmoid(d) - 0.9 = -0.15; else 0.9 ln 4 + 0.1 ln 4/3, 1/4 - 0.9.
WON, LOST = math.log(4 / 3), math.log(4)


@pytest.mark.parametrize(
    ("leads", "margin", "smoothing", "losses", "slopes"),
    [
        ((math.log(3), -math.log(3)), (0, 0), 0.0, (WON, LOST), (-1 / 4, -3 / 4)),
        ((math.log(3) + 0.5, 0), (0.5, math.log(3)), 0.0, (WON, LOST), (-1 / 4, -3 / 4)),
        ((math.log(3), -math.log(3)), (0, 0), 0.1,
         (0.9 * WON + 0.1 * LOST, 0.9 * LOST + 0.1 * WON), (-0.15, -0.65)),
        ((3, 0), (3, 0), 0.3, (math.log(2), math.log(2)), (-0.2, -0.2)),
    ],
)  # fmt: skip
def test_bradley_terry_by_hand(
    leads: tuple[float, ...], margin: tuple[float, ...], smoothing: float,
    losses: tuple[float, ...], slopes: tuple[float, ...],
) -> None:  # fmt: skip
    chosen, rejected = leaf(5 + leads[0], 2 + leads[1]), leaf(5, 2)
    loss = bradley_terry_loss(
        chosen, rejected, margin=leaf(*margin).detach(), label_smoothing=smoothing
    )
    close(loss, leaf(*losses).detach())
    loss.sum().backward()
    close(chosen.grad, leaf(*slopes).detach())
    close(rejected.grad, -leaf(*slopes).detach())


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


seeds = st.integers(0, 2**20)
LOSSES = ("sigmoid", "sigmoid_norm", "ipo")


def near(found: Tensor, expected: Tensor | float) -> None:
    torch.testing.assert_close(
        found, torch.as_tensor(expected, dtype=torch.float64).expand_as(found), rtol=0, atol=1e-10
    )


def number(x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)


def sides(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = 3 * torch.randn(2, 8, generator=generator, dtype=torch.float64)
    return chosen.requires_grad_(), rejected.requires_grad_()


def test_preference_loss_by_hand() -> None:
    """beta = 2, and log-ratios of 1/2 and -1/4: h = 3/4, beta h = 3/2."""
    given_ = {"beta": 2.0, "label_smoothing": 0.0}
    right = preference_loss(number(0.5), number(-0.25), loss_type="sigmoid", **given_)
    near(right, math.log(1 + math.exp(-1.5)))
    # The aim is 1 / (2 * 2) = 1/4, and 3/4 - 1/4 = 1/2.
    near(preference_loss(number(0.5), number(-0.25), loss_type="ipo", **given_), 0.25)


@pytest.mark.parametrize(
    ("loss_type", "expected"), [("sigmoid", math.log(2)), ("sigmoid_norm", math.log(2)), ("ipo", 4)]
)
def test_a_policy_that_is_the_reference(loss_type: str, expected: float) -> None:
    """log 2 whatever beta and smoothing are; for ipo 1 / (2 beta)^2."""
    for smoothing in (0.0, 0.3):
        found = preference_loss(
            number(0), number(0), beta=0.25, loss_type=loss_type, label_smoothing=smoothing
        )
        near(found, expected)


@drawn
@given(seeds, st.floats(0.02, 2), st.floats(0, 0.49))
def test_sigmoid_and_its_gradient(seed: int, beta: float, smoothing: float) -> None:
    """d loss / d chosen = -beta ((1 - e) sigmoid(-beta h) - e sigmoid(beta h))."""
    chosen, rejected = sides(seed)
    found = preference_loss(
        chosen, rejected, beta=beta, loss_type="sigmoid", label_smoothing=smoothing
    )
    h = (chosen - rejected).detach()
    win, lose = 1 / (1 + (-beta * h).exp()), 1 / (1 + (beta * h).exp())
    near(found, -(1 - smoothing) * win.log() - smoothing * lose.log())
    found.sum().backward()
    slope = -beta * ((1 - smoothing) * lose - smoothing * win)
    near(chosen.grad, slope)
    near(rejected.grad, -slope)


@drawn
@given(seeds, st.floats(0.05, 2), st.floats(0, 0.49))
def test_ipo_and_its_gradient(seed: int, beta: float, smoothing: float) -> None:
    """d loss / d chosen = 2 (h - (1 - 2 e) / (2 beta)): wrong labels bring the aim nearer to 0."""
    chosen, rejected = sides(seed)
    found = preference_loss(chosen, rejected, beta=beta, loss_type="ipo", label_smoothing=smoothing)
    h, aim = (chosen - rejected).detach(), 1 / (2 * beta)
    near(found, (1 - smoothing) * (h - aim) ** 2 + smoothing * (h + aim) ** 2)
    found.sum().backward()
    slope = 2 * (h - (1 - 2 * smoothing) * aim)
    near(chosen.grad, slope)
    near(rejected.grad, -slope)
