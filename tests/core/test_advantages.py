"""GAE and advantages without a critic: cases by hand, and slow sums that they abbreviate."""

from __future__ import annotations

import math
from fractions import Fraction

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

from .conftest import NAN, F, Ragged, T, close, drawn, ragged

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
