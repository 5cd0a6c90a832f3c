"""Advantages without a critic: rewards to go, and responses to one prompt against each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.advantages import (
    group_centered,
    group_normalised,
    leave_one_out,
    rewards_to_go,
)

from .conftest import NAN, F, Ragged, T, close, drawn, garbage, pad, ragged

GROUPED = (leave_one_out, group_centered, group_normalised)
unit = st.floats(0, 1)


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


@drawn
@given(ragged(), unit)
def test_rewards_to_go_are_the_discounted_sum_of_what_follows(batch: Ragged, gamma: float) -> None:
    rewards, slow = batch.normal(0), torch.zeros_like(batch.normal(0))
    for row, length in enumerate(batch.lengths):
        for t in range(length):
            for k in range(t, length):
                slow[row, t] += gamma ** (k - t) * rewards[row, k]
    close(rewards_to_go(rewards, batch.mask, gamma=gamma), slow)


@drawn
@given(ragged(), unit, st.integers(1, 3), garbage)
def test_rewards_to_go_padding_rows_and_parts(
    batch: Ragged, gamma: float, columns: int, filler: float
) -> None:
    rewards, mask, order = batch.normal(0), batch.mask, batch.shuffled_rows()
    whole = rewards_to_go(rewards, mask, gamma=gamma)
    wide = rewards_to_go(pad(rewards, columns, filler), pad(mask, columns, F), gamma=gamma)
    assert torch.equal(wide, pad(whole, columns, 0.0))
    assert torch.equal(rewards_to_go(rewards[order], mask[order], gamma=gamma), whole[order])
    parts = zip(rewards.split(1), mask.split(1), strict=True)
    assert torch.equal(torch.cat([rewards_to_go(*p, gamma=gamma) for p in parts]), whole)


def test_groups_by_hand() -> None:
    # Three responses to one prompt: (1, 2, 6), mean 3, deviations (-2, -1, 3), the others' means
    # (4, 7/2, 3/2), population variance (4 + 1 + 9) / 3 = 14/3. Three more of another prompt, all
    # alike, and worth more: nothing to choose among them.
    returns = doubles(1, 2, 6, 100, 100, 100)
    close(leave_one_out(returns, 3), doubles(1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0))
    close(group_centered(returns, 3), doubles(-2, -1, 3, 0, 0, 0))
    scale = math.sqrt(14 / 3) + 1e-4
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
                / (torch.stack([mine, *others]).var(correction=0).sqrt() + 1e-4)
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
def test_identities_of_a_group(drawn: tuple[Tensor, int]) -> None:
    returns, size = drawn
    centered = group_centered(returns, size)
    close(leave_one_out(returns, size), size / (size - 1) * centered)
    for estimator in GROUPED:
        sums = estimator(returns, size).view(-1, size).sum(dim=1)
        close(sums, torch.zeros_like(sums), atol=1e-9)
    deviation = returns.view(-1, size).std(dim=1, correction=0).repeat_interleave(size)
    close(group_normalised(returns, size) * (deviation + 1e-4), centered)


@drawn
@given(drawn_groups(), st.floats(0.1, 10), st.floats(-5, 5))
def test_an_offset_of_the_prompt_is_forgotten_and_grpo_forgets_the_scale(
    drawn: tuple[Tensor, int], scale: float, offset: float
) -> None:
    returns, size = drawn
    moved = scale * returns + offset
    for estimator in (leave_one_out, group_centered):
        close(estimator(moved, size), scale * estimator(returns, size), rtol=1e-8, atol=1e-9)
    # A = d / (s + 1e-4) against a d / (a s + 1e-4): equal but for 1e-4 / s, and 1e-4 / (a s).
    deviation = returns.view(-1, size).std(dim=1, correction=0).repeat_interleave(size)
    before = group_normalised(returns, size) * (1 + 1e-4 / deviation)
    after = group_normalised(moved, size) * (1 + 1e-4 / (scale * deviation))
    close(after, before, rtol=1e-7, atol=1e-8)


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


def test_arguments_are_left_alone() -> None:
    returns = doubles(1, 2, 6, 3)
    for estimator in GROUPED:
        estimator(returns, 2)
        assert returns.tolist() == [1, 2, 6, 3]
