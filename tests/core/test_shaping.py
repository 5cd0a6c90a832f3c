"""Where the score lands, what leaving the reference costs, and what a missing end costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.ppo_config import MissingEOS
from lightning_rlhf.core.shaping import apply_missing_eos, shape_rewards

from .conftest import NAN, F, Ragged, T, close, drawn, garbage, pad, ragged

SCORE = torch.tensor([2.0, -3.0, 0.5, -0.5], dtype=torch.float64)
ENDED = torch.tensor([T, T, F, F])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("none", [2, -3, 0.5, -0.5]),
        ("subtract", [2, -3, 0.5 - 1.5, -0.5 - 1.5]),
        ("replace", [2, -3, -1.5, -1.5]),
    ],
)
def test_missing_end_rules(rule: MissingEOS, expected: list[float]) -> None:
    score = SCORE.clone()
    assert apply_missing_eos(score, ENDED, rule, 1.5).tolist() == expected
    assert torch.equal(score, SCORE)


@pytest.mark.parametrize("rule", ["none", "subtract", "replace"])
def test_responses_that_ended_keep_their_score_whatever_the_rule(rule: MissingEOS) -> None:
    assert torch.equal(apply_missing_eos(SCORE, torch.ones_like(ENDED), rule, 9.0), SCORE)


def test_subtract_and_replace_at_penalty_zero() -> None:
    assert torch.equal(apply_missing_eos(SCORE, ENDED, "subtract", 0.0), SCORE)
    assert apply_missing_eos(SCORE, ENDED, "replace", 0.0).tolist() == [2, -3, 0, 0]


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ppo\.missing_eos is 'maybe'; allowed: none, subtract"):
        apply_missing_eos(SCORE, ENDED, "maybe", 1.0)  # type: ignore[arg-type]


def test_gradient_reaches_the_score_unless_it_was_replaced() -> None:
    for rule, expected in (("none", [1, 1]), ("subtract", [1, 1]), ("replace", [1, 0])):
        score = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        apply_missing_eos(score, torch.tensor([T, F]), rule, 3.0).sum().backward()
        assert score.grad.tolist() == expected


def test_rewards_by_hand() -> None:
    # kl_coef 1/2. Row 0: (-1/2 * 1, -1/2 * -2, -1/2 * 4 + 10); row 1 ends at its first token.
    kl = torch.tensor([[1, -2, 4], [3, NAN, 100]], dtype=torch.float64)
    mask = torch.tensor([[T, T, T], [T, F, F]])
    score = torch.tensor([10.0, -1.0], dtype=torch.float64)
    rewards = shape_rewards(score, kl, mask, kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 1, 8], [-2.5, 0, 0]]


def test_leaving_the_reference_costs() -> None:
    # A token more likely under the policy than under the reference has positive kl: less reward.
    kl = torch.tensor([[0.0, 0.7, 0.0]], dtype=torch.float64, requires_grad=True)
    mask, score = torch.ones(1, 3, dtype=torch.bool), torch.tensor([1.0], dtype=torch.float64)
    rewards = shape_rewards(score, kl, mask, kl_coef=0.1)
    assert rewards.sum() < score.sum()
    rewards.sum().backward()
    close(kl.grad, torch.full_like(kl, -0.1))


def test_no_leash() -> None:
    kl = torch.full((1, 2), 50.0)
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert shape_rewards(torch.tensor([3.0]), kl, mask, kl_coef=0.0).tolist() == [[0, 3]]


def test_a_row_without_tokens_gets_no_reward() -> None:
    mask = torch.tensor([[F, F], [T, F]])
    rewards = shape_rewards(torch.tensor([3.0, 4.0]), torch.zeros(2, 2), mask, kl_coef=1.0)
    assert rewards.tolist() == [[0, 0], [4, 0]]


@drawn
@given(ragged(), st.floats(0, 2))
def test_rewards_of_a_response_sum_to_score_minus_the_price_of_its_kl(
    batch: Ragged, kl_coef: float
) -> None:
    score, kl = batch.row_normal(0), batch.normal(1)
    rewards = shape_rewards(score, kl, batch.mask, kl_coef=kl_coef)
    close(rewards.sum(1), score - kl_coef * kl.nan_to_num().sum(1))
    for row, length in enumerate(batch.lengths):
        expected = [-kl_coef * k for k in kl[row, :length].tolist()]
        expected[-1] += score[row].item()
        close(rewards[row, :length], torch.tensor(expected, dtype=torch.float64))
        assert (rewards[row, length:] == 0).all()


@drawn
@given(ragged(), st.floats(0, 2), st.integers(1, 3), garbage)
def test_padding_rows_and_parts(batch: Ragged, kl_coef: float, columns: int, filler: float) -> None:
    score, kl, mask = batch.row_normal(0), batch.normal(1), batch.mask
    whole = shape_rewards(score, kl, mask, kl_coef=kl_coef)
    wide = shape_rewards(score, pad(kl, columns, filler), pad(mask, columns, F), kl_coef=kl_coef)
    assert torch.equal(wide, pad(whole, columns, 0.0))
    order = batch.shuffled_rows()
    shuffled = shape_rewards(score[order], kl[order], mask[order], kl_coef=kl_coef)
    assert torch.equal(shuffled, whole[order])
    parts = zip(score.split(1), kl.split(1), mask.split(1), strict=True)
    assert torch.equal(torch.cat([shape_rewards(*p, kl_coef=kl_coef) for p in parts]), whole)


@drawn
@given(ragged(), st.floats(0, 2))
def test_gradients(batch: Ragged, kl_coef: float) -> None:
    # d reward / d score is 1 at the last token only; d reward / d kl is -kl_coef on real tokens.
    weight = batch.normal(2).nan_to_num()
    score, kl = batch.row_normal(0).requires_grad_(), batch.normal(1).requires_grad_()
    (shape_rewards(score, kl, batch.mask, kl_coef=kl_coef) * weight).sum().backward()
    last = torch.tensor(batch.lengths) - 1
    close(score.grad, weight[torch.arange(len(last)), last])
    close(kl.grad, -kl_coef * weight)
