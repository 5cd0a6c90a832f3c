"""GAE against a hand-made case, its two ends, and the sum it abbreviates."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.advantages import gae

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
@given(ragged(), unit)
def test_lambda_0_is_the_one_step_error(batch: Ragged, gamma: float) -> None:
    rewards, values, mask = batch.normal(0), batch.normal(1), batch.mask
    advantages, _ = gae(rewards, values, mask, gamma=gamma, gae_lambda=0.0)
    after = torch.cat([values[:, 1:], torch.zeros(len(values), 1)], dim=1).nan_to_num()
    close(advantages[mask], (rewards + gamma * after - values)[mask])


@drawn
@given(ragged(), unit)
def test_gamma_0_looks_at_one_token_only(batch: Ragged, gae_lambda: float) -> None:
    rewards, values, mask = batch.normal(0), batch.normal(1), batch.mask
    advantages, returns = gae(rewards, values, mask, gamma=0.0, gae_lambda=gae_lambda)
    close(advantages[mask], (rewards - values)[mask])
    close(returns[mask], rewards[mask])


@drawn
@given(ragged(), unit, unit)
def test_a_perfect_critic_leaves_no_advantage(
    batch: Ragged, gamma: float, gae_lambda: float
) -> None:
    rewards, mask = batch.normal(0), batch.mask
    _, values = slow_gae(rewards, torch.zeros_like(rewards), batch.lengths, gamma, 1.0)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    close(advantages, torch.zeros_like(advantages), atol=1e-9)
    close(returns, values)


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


@drawn
@given(ragged(), unit, unit)
def test_gradients(batch: Ragged, gamma: float, gae_lambda: float) -> None:
    weight = batch.normal(2).nan_to_num()
    grads = []
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


def test_arguments_are_left_alone() -> None:
    rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    mask = torch.tensor([[T, F]])
    gae(rewards, values, mask, gamma=0.9, gae_lambda=0.9)
    assert rewards.tolist() == [[1, 2]]
    assert values.tolist() == [[3, 4]]
    assert mask.tolist() == [[T, F]]
