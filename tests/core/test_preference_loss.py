"""The losses of direct preference optimization: cases by hand, and gradients in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.losses import preference_loss

from .conftest import drawn

seeds = st.integers(0, 2**20)
LOSSES = ("sigmoid", "sigmoid_norm", "ipo")


def close(found: Tensor, expected: Tensor | float) -> None:
    torch.testing.assert_close(
        found, torch.as_tensor(expected, dtype=torch.float64).expand_as(found), rtol=0, atol=1e-10
    )


def number(x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)


def sides(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = 3 * torch.randn(2, 8, generator=generator, dtype=torch.float64)
    return chosen.requires_grad_(), rejected.requires_grad_()


def test_by_hand() -> None:
    """beta = 2, and log-ratios of 1/2 and -1/4: h = 3/4, beta h = 3/2."""
    given_ = {"beta": 2.0, "label_smoothing": 0.0}
    right = preference_loss(number(0.5), number(-0.25), loss_type="sigmoid", **given_)
    close(right, math.log(1 + math.exp(-1.5)))
    # The aim is 1 / (2 * 2) = 1/4, and 3/4 - 1/4 = 1/2.
    close(preference_loss(number(0.5), number(-0.25), loss_type="ipo", **given_), 0.25)


@pytest.mark.parametrize(
    ("loss_type", "expected"), [("sigmoid", math.log(2)), ("sigmoid_norm", math.log(2)), ("ipo", 4)]
)
def test_a_policy_that_is_the_reference(loss_type: str, expected: float) -> None:
    """log 2 whatever beta and smoothing are; for ipo 1 / (2 beta)^2."""
    for smoothing in (0.0, 0.3):
        found = preference_loss(
            number(0), number(0), beta=0.25, loss_type=loss_type, label_smoothing=smoothing
        )
        close(found, expected)


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
    close(found, -(1 - smoothing) * win.log() - smoothing * lose.log())
    found.sum().backward()
    slope = -beta * ((1 - smoothing) * lose - smoothing * win)
    close(chosen.grad, slope)
    close(rejected.grad, -slope)


@drawn
@given(seeds, st.floats(0.05, 2), st.floats(0, 0.49))
def test_ipo_and_its_gradient(seed: int, beta: float, smoothing: float) -> None:
    """d loss / d chosen = 2 (h - (1 - 2 e) / (2 beta)): wrong labels bring the aim nearer to 0."""
    chosen, rejected = sides(seed)
    found = preference_loss(chosen, rejected, beta=beta, loss_type="ipo", label_smoothing=smoothing)
    h, aim = (chosen - rejected).detach(), 1 / (2 * beta)
    close(found, (1 - smoothing) * (h - aim) ** 2 + smoothing * (h + aim) ** 2)
    found.sum().backward()
    slope = 2 * (h - (1 - 2 * smoothing) * aim)
    close(chosen.grad, slope)
    close(rejected.grad, -slope)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_swapped_sides_are_a_label_that_is_wrong_for_certain(loss_type: str) -> None:
    """(1 - e) l(h) + e l(-h) of swapped sides has e and 1 - e exchanged."""
    chosen, rejected = (x.detach() for x in sides(0))

    def loss(a: Tensor, b: Tensor, smoothing: float) -> Tensor:
        return preference_loss(a, b, beta=0.3, loss_type=loss_type, label_smoothing=smoothing)

    close(loss(rejected, chosen, 0.2), loss(chosen, rejected, 0.8))
