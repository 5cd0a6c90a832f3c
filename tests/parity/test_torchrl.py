"""Advantages against torchrl's, on rows of uneven length that are done at their last token."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    reward2go,
    td_lambda_return_estimate,
    vec_generalized_advantage_estimate,
)

from lightning_rlhf.core.experience import gae, rewards_to_go

from .conftest import close, ragged

Estimate = Callable[..., tuple[Tensor, Tensor]]
DISCOUNTS = [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0)]
discounts = pytest.mark.parametrize(("gamma", "gae_lambda"), DISCOUNTS)
estimates = pytest.mark.parametrize(
    ("estimate", "gamma", "gae_lambda"),
    [(generalized_advantage_estimate, *both) for both in DISCOUNTS]
    # torchrl 0.14.1's vectorised one raises an IndexError for lambda 0
    + [(vec_generalized_advantage_estimate, *both) for both in DISCOUNTS if both[1] > 0],
)


def last(mask: Tensor) -> Tensor:
    """True on the last real token of each row, and on padding, where nothing goes on either."""
    lengths = mask.sum(dim=1, keepdim=True)
    return torch.arange(mask.shape[1]) >= lengths - 1


def following(values: Tensor) -> Tensor:
    return torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], dim=1)


@estimates
def test_gae_of_padded_rows(estimate: Estimate, gamma: float, gae_lambda: float) -> None:
    mask, rewards, values = ragged(rows=9, width=12, seed=0)
    columns = (values, following(values), rewards, last(mask))
    theirs = estimate(gamma, gae_lambda, *(x.unsqueeze(-1) for x in columns))
    ours = gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    for found, expected in zip(ours, theirs, strict=True):
        close(found, torch.where(mask, expected.squeeze(-1), 0))


@discounts
def test_returns_are_lambda_returns(gamma: float, gae_lambda: float) -> None:
    mask, rewards, values = ragged(rows=9, width=12, seed=2)
    columns = (x.unsqueeze(-1) for x in (following(values), rewards, last(mask)))
    theirs = td_lambda_return_estimate(gamma, gae_lambda, *columns)
    _, returns = gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    close(returns, torch.where(mask, theirs.squeeze(-1), 0))


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_rewards_to_go(gamma: float) -> None:
    mask, rewards, _ = ragged(rows=9, width=12, seed=3)
    theirs = reward2go(rewards.unsqueeze(-1), last(mask).unsqueeze(-1), gamma).squeeze(-1)
    close(rewards_to_go(rewards, mask, gamma=gamma), torch.where(mask, theirs, 0))


@discounts
def test_a_truncated_response_differs_by_the_value_that_follows(
    gamma: float, gae_lambda: float
) -> None:
    """torchrl, for a row that is done but not terminated, adds what the critic expects next.

    To delta at the last token, T - 1, that adds gamma V_T; k tokens earlier (gamma lambda)^k of
    it. Ours treats a response that ran out of room as ended.
    """
    mask, rewards, values = ragged(rows=9, width=12, seed=4)
    after = torch.full((9, 1), 0.7, dtype=torch.float64)
    full = mask.all(dim=1, keepdim=True)
    following_values = torch.where(
        full, torch.cat([values[:, 1:], after], dim=1), following(values)
    )
    done = last(mask)
    columns = (values, following_values, rewards, done, done & ~full)
    theirs, _ = generalized_advantage_estimate(
        gamma, gae_lambda, *(x.unsqueeze(-1) for x in columns)
    )
    ours, _ = gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    tokens_left = 11 - torch.arange(12)
    expected = torch.where(full, gamma * 0.7 * (gamma * gae_lambda) ** tokens_left, 0)
    close(torch.where(mask, theirs.squeeze(-1), 0) - ours, expected)
