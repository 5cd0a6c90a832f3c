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


def test_a_margin_by_hand() -> None:
    # The lead is ln 3 + 1/2 and the margin asks for 1/2: as a lead of ln 3, which wins with 3/4.
    # In the second pair the lead of 0 falls short by ln 3: it wins with 1/4.
    chosen, rejected = leaf(math.log(3) + 0.5, 2.0), leaf(0.0, 2.0)
    loss = bradley_terry_loss(chosen, rejected, margin=leaf(0.5, math.log(3)).detach())
    close(loss, torch.tensor([math.log(4 / 3), math.log(4)], dtype=torch.float64))
    loss.sum().backward()
    close(chosen.grad, torch.tensor([-1 / 4, -3 / 4], dtype=torch.float64))
    close(rejected.grad, torch.tensor([1 / 4, 3 / 4], dtype=torch.float64))


def test_label_smoothing_by_hand() -> None:
    # sigmoid(ln 3) = 3/4, and one label in ten is believed to be wrong:
    # 0.9 ln 4/3 + 0.1 ln 4; slope sigmoid(d) - 0.9 = -0.15.
    # The other way round 0.9 ln 4 + 0.1 ln 4/3; slope 1/4 - 0.9 = -0.65.
    chosen, rejected = leaf(math.log(3), 0.0), leaf(0.0, math.log(3))
    loss = bradley_terry_loss(chosen, rejected, label_smoothing=0.1)
    won, lost = math.log(4 / 3), math.log(4)
    expected = [0.9 * won + 0.1 * lost, 0.9 * lost + 0.1 * won]
    close(loss, torch.tensor(expected, dtype=torch.float64))
    loss.sum().backward()
    close(chosen.grad, torch.tensor([-0.15, -0.65], dtype=torch.float64))
    close(rejected.grad, torch.tensor([0.15, 0.65], dtype=torch.float64))


@pytest.mark.parametrize("smoothing", [0.05, 0.2, 0.45])
def test_label_smoothing_wants_a_lead_of_so_much_and_no_more(smoothing: float) -> None:
    # The slope sigmoid(d) - (1 - e) is 0 at d = log((1 - e) / e), and the loss is convex.
    best = math.log((1 - smoothing) / smoothing)
    lead = leaf(best, best - 0.1, best + 0.1)
    loss = bradley_terry_loss(lead, torch.zeros_like(lead), label_smoothing=smoothing)
    loss.sum().backward()
    assert lead.grad is not None
    at, below, above = lead.grad.tolist()
    assert at == pytest.approx(0, abs=1e-12)
    assert below < 0 < above
    # The least possible is the entropy of a coin that falls wrong with probability e.
    entropy = -smoothing * math.log(smoothing) - (1 - smoothing) * math.log(1 - smoothing)
    assert loss[0].item() == pytest.approx(entropy, rel=1e-12)
    assert min(loss[1:].tolist()) > entropy


def test_smoothing_and_margin_together_smooth_about_the_margin() -> None:
    # A lead of 3 with a margin of 3 is a tie, whichever label is right.
    loss = bradley_terry_loss(leaf(3.0), leaf(0.0), margin=3.0, label_smoothing=0.3)
    close(loss.detach(), torch.tensor([math.log(2)], dtype=torch.float64))


def test_no_margin_and_no_smoothing_are_the_plain_loss_to_the_last_bit() -> None:
    chosen, rejected = draw((50, 4), 2)
    plain = -torch.nn.functional.logsigmoid(chosen - rejected)
    nothing = torch.zeros(50, dtype=torch.float64)
    assert torch.equal(bradley_terry_loss(chosen, rejected), plain)
    assert torch.equal(
        bradley_terry_loss(chosen, rejected, margin=nothing, label_smoothing=0.0), plain
    )
