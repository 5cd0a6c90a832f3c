"""Losses of policy, critic and pairs: by hand, and the sign and size of the gradient."""

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
    policy_loss,
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


def test_preference_loss_by_hand() -> None:
    """beta = 2, and log-ratios of 1/2 and -1/4: h = 3/4, beta h = 3/2; and a tie.

    The aim of ipo is 1 / (2 * 2) = 1/4, and 3/4 - 1/4 = 1/2. At a tie, as for a policy that is the
    reference, sigmoid is log 2 whatever the smoothing is, and ipo (1/4)^2.
    """
    chosen, rejected = leaf(0.5, 1.0).detach(), leaf(-0.25, 1.0).detach()
    for loss_type, right, tie in (
        ("sigmoid", math.log(1 + math.exp(-1.5)), math.log(2)),
        ("sigmoid_norm", math.log(1 + math.exp(-1.5)), math.log(2)),
        ("ipo", 0.25, 1 / 16),
    ):
        found, smoothed = (
            preference_loss(chosen, rejected, beta=2.0, loss_type=loss_type, label_smoothing=e)
            for e in (0.0, 0.3)
        )
        close(found, leaf(right, tie).detach())
        close(smoothed[1], found[1])


@drawn
@given(sizes_and_seeds, st.floats(0.05, 2), st.floats(0, 0.49))
def test_preference_losses_and_their_gradients(
    drawn_: tuple[int, int], beta: float, smoothing: float
) -> None:
    """d loss / d chosen is -beta ((1 - e) sigmoid(-beta h) - e sigmoid(beta h)), and of ipo
    2 (h - (1 - 2 e) / (2 beta)): wrong labels bring its aim nearer to 0."""
    sides = 3 * draw(drawn_, 2)
    h, aim = sides[0] - sides[1], 1 / (2 * beta)
    win, lose = 1 / (1 + (-beta * h).exp()), 1 / (1 + (beta * h).exp())
    for loss_type, loss, slope in (
        ("sigmoid", -(1 - smoothing) * win.log() - smoothing * lose.log(),
         -beta * ((1 - smoothing) * lose - smoothing * win)),
        ("ipo", (1 - smoothing) * (h - aim) ** 2 + smoothing * (h + aim) ** 2,
         2 * (h - (1 - 2 * smoothing) * aim)),
    ):  # fmt: skip
        chosen, rejected = (side.clone().requires_grad_() for side in sides)
        found = preference_loss(
            chosen, rejected, beta=beta, loss_type=loss_type, label_smoothing=smoothing
        )
        close(found, loss, atol=1e-10)
        found.sum().backward()
        close(chosen.grad, slope, atol=1e-10)
        close(rejected.grad, -slope, atol=1e-10)


# The clipped surrogate.

low_ends = st.floats(0.05, 0.9)
high_ends = st.none() | st.floats(0.05, 3)
dual_clips = st.none() | st.floats(1.05, 4)


def loss_and_slope(
    new: Tensor, old: Tensor, advantages: Tensor, clip_range: float,
    clip_range_high: float | None, dual_clip: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logprobs = new.clone().requires_grad_()
    loss = policy_loss(
        logprobs, old, advantages, clip_range=clip_range, clip_range_high=clip_range_high,
        dual_clip=dual_clip,
    )  # fmt: skip
    loss.sum().backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad


# The loss is max(-A r, -A clip(r)), its slope in the log-probability -A r where the first is the
# larger, else 0.
SYMMETRIC = (0.2, None, None)  # the ratio is kept within 0.8 .. 1.2
HIGHER = (0.2, 0.5, None)  # 0.8 .. 1.5
DUAL = (0.2, None, 3.0)  # and where A < 0 the loss is at most 3 |A|


@pytest.mark.parametrize(
    ("rule", "advantage", "ratio", "loss", "slope"),
    [
        (SYMMETRIC, 2, 1.5, -2.4, 0.0),  # good and already much likelier: nothing more to gain
        (SYMMETRIC, 2, 0.5, -1.0, -1.0),  # good and less likely than before: pulled back up
        (SYMMETRIC, -2, 1.5, 3.0, 3.0),  # bad and much likelier: pushed down
        (SYMMETRIC, -2, 0.5, 1.6, 0.0),  # bad and already much less likely: nothing more to gain
        (SYMMETRIC, 2, 1.0, -2.0, -2.0),  # an iteration's first step: the plain policy gradient
        (SYMMETRIC, -2, 1.0, 2.0, 2.0),
        (SYMMETRIC, -2, 9.0, 18.0, 18.0),  # no bound on this side
        (HIGHER, 2, 1.4, -2.8, -2.8),  # good and likelier: goes on where 1.2 would have stopped it
        (HIGHER, 2, 1.6, -3.0, 0.0),
        (HIGHER, -2, 0.7, 1.6, 0.0),  # the lower end stays where it was
        (DUAL, -2, 2.9, 5.8, 5.8),
        (DUAL, -2, 3.5, 6.0, 0.0),  # bad and far likelier: no longer listened to
        (DUAL, 2, 3.5, -2.4, 0.0),  # good tokens do not meet it
    ],
)
def test_policy_loss_by_hand(
    rule: tuple[float, float | None, float | None],
    advantage: float,
    ratio: float,
    loss: float,
    slope: float,
) -> None:
    old = torch.tensor([-1.25], dtype=torch.float64)
    advantages = torch.full_like(old, advantage)
    found, found_slope = loss_and_slope(old + math.log(ratio), old, advantages, *rule)
    close(found, torch.full_like(old, loss))
    close(found_slope, torch.full_like(old, slope))


@drawn
@given(sizes_and_seeds, low_ends, high_ends, dual_clips)
def test_it_is_the_ratio_kept_from_rewarding_a_long_step(
    drawn_: tuple[int, int], low: float, high: float | None, dual: float | None
) -> None:
    # Case by case: a good token counts min(r, 1 + high), a bad one max(r, 1 - low), at most dual.
    old, advantages, steps = draw(drawn_, 3)
    new = old + 1.5 * steps
    logprobs = new.clone().requires_grad_()
    rows = []
    for n, o, a in zip(logprobs, old, advantages, strict=True):
        ratio, top = (n - o).exp(), 1 + (low if high is None else high)
        if a >= 0:
            counted = ratio if ratio <= top else torch.tensor(top)
        elif ratio < 1 - low:
            counted = torch.tensor(1 - low)
        else:
            counted = ratio if dual is None or ratio <= dual else torch.tensor(dual)
        rows.append(-a * counted.double() + 0 * n)
    slow = torch.stack(rows)
    slow.sum().backward()
    loss, slope = loss_and_slope(new, old, advantages, low, high, dual)
    close(loss, slow.detach(), rtol=1e-7)
    close(slope, logprobs.grad)
