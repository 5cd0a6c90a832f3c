"""The clipped surrogate: cases by hand, the sign and size of its gradient, and where it is 0."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.losses import policy_loss

from .conftest import close, drawn

sizes_and_seeds = st.tuples(st.integers(1, 20), st.integers(0, 2**20))
low_ends = st.floats(0.05, 0.9)
high_ends = st.none() | st.floats(0.05, 3)
dual_clips = st.none() | st.floats(1.05, 4)


def draw(size_and_seed: tuple[int, int], count: int) -> Tensor:
    size, seed = size_and_seed
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, generator=generator, dtype=torch.float64)


def loss_and_slope(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    clip_range: float,
    clip_range_high: float | None,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor]:
    logprobs = new.clone().requires_grad_()
    loss = policy_loss(
        logprobs,
        old,
        advantages,
        clip_range=clip_range,
        clip_range_high=clip_range_high,
        dual_clip=dual_clip,
    )
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
        (SYMMETRIC, 2, 1.1, -2.2, -2.2),
        (SYMMETRIC, 2, 0.9, -1.8, -1.8),
        (SYMMETRIC, -2, 1.1, 2.2, 2.2),
        (SYMMETRIC, -2, 0.9, 1.8, 1.8),
        (SYMMETRIC, 2, 1.0, -2.0, -2.0),  # an iteration's first step: the plain policy gradient
        (SYMMETRIC, -2, 1.0, 2.0, 2.0),
        (SYMMETRIC, 0, 1.5, 0.0, 0.0),
        (SYMMETRIC, -2, 9.0, 18.0, 18.0),  # no bound on this side
        (HIGHER, 2, 1.4, -2.8, -2.8),  # good and likelier: goes on where 1.2 would have stopped it
        (HIGHER, 2, 1.6, -3.0, 0.0),
        (HIGHER, 2, 0.7, -1.4, -1.4),
        (HIGHER, -2, 0.7, 1.6, 0.0),  # the lower end stays where it was
        (HIGHER, -2, 1.6, 3.2, 3.2),
        (DUAL, -2, 2.9, 5.8, 5.8),
        (DUAL, -2, 3.5, 6.0, 0.0),  # bad and far likelier: no longer listened to
        (DUAL, -2, 0.5, 1.6, 0.0),
        (DUAL, 2, 3.5, -2.4, 0.0),  # good tokens do not meet it
        (DUAL, 2, 0.5, -1.0, -1.0),
        (DUAL, 0, 3.5, 0.0, 0.0),
    ],
)
def test_by_hand(
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
