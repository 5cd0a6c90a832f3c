"""GAE and advantages without a critic: cases by hand, and slow sums that they abbreviate."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.experience import (
    gae,
    group_centered,
    group_normalised,
    leave_one_out,
    rewards_to_go,
)

from .conftest import NAN, F, Ragged, T, close, drawn, garbage, pad, ragged

unit = st.floats(0, 1)


def slow_gae(
    rewards: Tensor, values: Tensor, lengths: tuple[int, ...], gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """A_t = sum over l of (gamma lambda)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}), row by row."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row, length in enumerate(lengths):
        r, v = list(rewards[row, :length]), [*values[row, :length], torch.zeros(())]
        for t in range(length):
            advantages[row, t] = sum(
                (gamma * gae_lambda) ** (k - t) * (r[k] + gamma * v[k + 1] - v[k])
                for k in range(t, length)
            )
            returns[row, t] = advantages[row, t] + v[t]
    return advantages, returns


def test_three_tokens_by_hand() -> None:
    # gamma = lambda = 1/2, r = (1, 2, 4), V = (1, 1/2, 2), nothing after the last token:
    #   delta = (1 + 1/2 * 1/2 - 1,  2 + 1/2 * 2 - 1/2,  4 + 0 - 2) = (1/4, 5/2, 2)
    #   A_2 = 2,  A_1 = 5/2 + 1/4 * 2 = 3,  A_0 = 1/4 + 1/4 * 3 = 1
    #   R = A + V = (2, 7/2, 4)
    # The second row is the last token alone; what stands on its padding is not read.
    half = float(Fraction(1, 2))
    rewards = torch.tensor([[1, 2, 4], [4, NAN, NAN]], dtype=torch.float64)
    values = torch.tensor([[1, half, 2], [2, NAN, 9]], dtype=torch.float64)
    mask = torch.tensor([[T, T, T], [T, F, F]])
    advantages, returns = gae(rewards, values, mask, gamma=half, gae_lambda=half)
    assert advantages.tolist() == [[1, 3, 2], [2, 0, 0]]
    assert returns.tolist() == [[2, 3.5, 4], [4, 0, 0]]


def test_credit_ends_at_a_gap() -> None:
    # Nothing of the reward 4 behind the gap reaches the token before it: 1 - 1/2, 0, 4 - 2.
    rewards, values = torch.tensor([[[1.0, 9, 4]], [[0.5, 9, 2]]])
    mask = torch.tensor([[T, F, T]])
    advantages, _ = gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
    assert advantages.tolist() == [[0.5, 0, 2]]


@drawn
@given(ragged(), unit, unit)
def test_it_is_the_discounted_sum_of_one_step_errors(
    batch: Ragged, gamma: float, gae_lambda: float
) -> None:
    rewards, values = batch.normal(0), batch.normal(1)
    found = gae(rewards, values, batch.mask, gamma=gamma, gae_lambda=gae_lambda)
    expected = slow_gae(rewards, values, batch.lengths, gamma, gae_lambda)
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)
        assert torch.equal(ours[~batch.mask], torch.zeros_like(ours[~batch.mask]))


@drawn
@given(ragged(), unit, unit)
def test_gradients(batch: Ragged, gamma: float, gae_lambda: float) -> None:
    weight, grads = batch.normal(2).nan_to_num(), []
    for function in (
        lambda r, v: gae(r, v, batch.mask, gamma=gamma, gae_lambda=gae_lambda),
        lambda r, v: slow_gae(r, v, batch.lengths, gamma, gae_lambda),
    ):
        rewards, values = batch.normal(0).requires_grad_(), batch.normal(1).requires_grad_()
        advantages, returns = function(rewards, values)
        (advantages * weight + returns * weight**2).sum().backward()
        grads.append((rewards.grad, values.grad))
    for ours, theirs in zip(*grads, strict=True):
        close(ours[batch.mask], theirs[batch.mask])


@drawn
@given(ragged(), unit)
def test_lambda_1_is_monte_carlo_minus_value(batch: Ragged, gamma: float) -> None:
    rewards, values, mask = batch.normal(0), batch.normal(1), batch.mask
    advantages, returns = gae(rewards, values, mask, gamma=gamma, gae_lambda=1.0)
    monte_carlo = torch.zeros_like(rewards)
    for row, length in enumerate(batch.lengths):
        for t in range(length):
            monte_carlo[row, t] = sum(gamma ** (k - t) * rewards[row, k] for k in range(t, length))
    close(returns, monte_carlo)
    close(advantages[mask], (monte_carlo - values)[mask])


@drawn
@given(ragged(), unit, unit, st.integers(1, 3), garbage)
def test_padding_rows_and_parts(
    batch: Ragged, gamma: float, gae_lambda: float, columns: int, filler: float
) -> None:
    def run(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return torch.stack(gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda))

    rewards, values, mask = batch.normal(0), batch.normal(1), batch.mask
    whole = run(rewards, values, mask)
    wide = run(pad(rewards, columns, filler), pad(values, columns, filler), pad(mask, columns, F))
    assert torch.equal(wide[..., : batch.width], whole)
    assert torch.equal(wide[..., batch.width :], torch.zeros_like(wide[..., batch.width :]))
    order = batch.shuffled_rows()
    assert torch.equal(run(rewards[order], values[order], mask[order]), whole[:, order])
    parts = [run(*p) for p in zip(rewards.split(1), values.split(1), mask.split(1), strict=True)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


GROUPED = (leave_one_out, group_centered, group_normalised)


@st.composite
def drawn_groups(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Returns of a few groups, and the size of a group."""
    size, groups = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    return torch.randn(groups * size, generator=generator, dtype=torch.float64), size


def doubles(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_rewards_to_go_by_hand() -> None:
    # gamma 1/2, r = (1, 2, 4): 4; 2 + 4/2 = 4; 1 + 4/2 = 3. The second row is one token.
    rewards = torch.tensor([[1, 2, 4], [5, NAN, 9]], dtype=torch.float64)
    mask = torch.tensor([[T, T, T], [T, F, F]])
    assert rewards_to_go(rewards, mask, gamma=0.5).tolist() == [[3, 4, 4], [5, 0, 0]]


def test_groups_by_hand() -> None:
    # Three responses to one prompt: (1, 2, 6), mean 3, deviations (-2, -1, 3), the others' means
    # (4, 7/2, 3/2), sample variance (4 + 1 + 9) / 2 = 7. Three more of another prompt, all
    # alike, and worth more: nothing to choose among them.
    returns = doubles(1, 2, 6, 100, 100, 100)
    close(leave_one_out(returns, 3), doubles(1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0))
    close(group_centered(returns, 3), doubles(-2, -1, 3, 0, 0, 0))
    scale = math.sqrt(7) + 1e-4
    close(group_normalised(returns, 3), doubles(-2, -1, 3, 0, 0, 0) / scale)


@pytest.mark.parametrize(
    ("estimator", "slow"),
    [
        (leave_one_out, lambda mine, others: mine - sum(others) / len(others)),
        (group_centered, lambda mine, others: mine - (mine + sum(others)) / (1 + len(others))),
        (
            group_normalised,
            lambda mine, others: (
                (mine - torch.stack([mine, *others]).mean())
                / (torch.stack([mine, *others]).var().sqrt() + 1e-4)
            ),
        ),
    ],
)
@drawn
@given(drawn=drawn_groups())
def test_each_response_against_its_group(estimator, slow, drawn: tuple[Tensor, int]) -> None:
    returns, size = drawn
    found = estimator(returns, size)
    for i, mine in enumerate(returns):
        first = i // size * size
        others = [returns[j] for j in range(first, first + size) if j != i]
        close(found[i], slow(mine, others))


@drawn
@given(drawn_groups())
def test_groups_do_not_see_each_other(drawn: tuple[Tensor, int]) -> None:
    returns, size = drawn
    flipped = returns.view(-1, size).flip(0, 1).flatten()
    for estimator in GROUPED:
        whole = estimator(returns, size)
        parts = [estimator(part, size) for part in returns.split(size)]
        close(torch.cat(parts), whole)
        close(estimator(flipped, size), whole.view(-1, size).flip(0, 1).flatten())
