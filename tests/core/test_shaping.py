"""The score for PPO and its tokens: moments, rules in their order, rewards per token."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.ppo_config import MissingEOS
from lightning_rlhf.core.shaping import (
    NO_SCORES,
    RunningMoments,
    apply_missing_eos,
    rewards_overflow,
    shape_rewards,
    shape_score,
)

from .configs import ppo_config
from .conftest import NAN, F, T, drawn

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


def test_rewards_by_hand() -> None:
    # kl_coef 1/2. Row 0: (-1/2 * 1, -1/2 * -2, -1/2 * 4 + 10); row 1 ends at its first token.
    kl = torch.tensor([[1, -2, 4], [3, NAN, 100]], dtype=torch.float64)
    mask = torch.tensor([[T, T, T], [T, F, F]])
    score = torch.tensor([10.0, -1.0], dtype=torch.float64)
    rewards = shape_rewards(score, kl, mask, kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 1, 8], [-2.5, 0, 0]]


def test_a_row_without_tokens_gets_no_reward() -> None:
    mask = torch.tensor([[F, F], [T, F]])
    rewards = shape_rewards(torch.tensor([3.0, 4.0]), torch.zeros(2, 2), mask, kl_coef=1.0)
    assert rewards.tolist() == [[0, 0], [4, 0]]


@pytest.mark.parametrize(("reward", "kl", "is_cause"), [(1, 1, F), (1e20, 1, T), (1e20, 1e20, F)])
def test_squares_of_rewards_are_too_large_where_those_of_the_kl_are_not(
    reward: float, kl: float, is_cause: bool
) -> None:
    experience: Any = SimpleNamespace(rewards=torch.tensor([[reward]]), kl=torch.tensor([[kl]]))
    assert rewards_overflow(experience) == is_cause


numbers = st.lists(st.floats(-100, 100), min_size=1, max_size=12)


def doubles(*found: float) -> Tensor:
    return torch.tensor(found, dtype=torch.float64)


def test_moments_by_hand() -> None:
    # 1, 3: mean 2, squared deviations 1 + 1. With 5: mean 3, 4 + 0 + 4. Population: 8 / 3.
    first = NO_SCORES.including(doubles(1, 3))
    assert (first.count, first.mean, first.squares, first.std) == (2, 2, 2, 1)
    second = first.including(doubles(5))
    assert (second.count, second.mean, second.squares) == (3, 3, 8)
    assert second.std == math.sqrt(8 / 3)
    assert (first.count, first.mean) == (2, 2)
    with pytest.raises(FrozenInstanceError):
        first.mean = 0.0  # type: ignore[misc]


def test_where_all_are_alike_there_is_nothing_to_scale_by() -> None:
    assert NO_SCORES.std == 1
    alike = NO_SCORES.including(torch.full((3,), 0.1)).including(torch.full((7,), 0.1))
    assert alike.std == 1
    assert alike.count == 10


@drawn
@given(numbers, st.integers(1, 12), st.randoms(use_true_random=False))
def test_batches_in_any_split_and_order_have_the_moments_of_all(
    scores: list[float], size: int, random: Any
) -> None:
    at_once = NO_SCORES.including(doubles(*scores))
    shuffled = random.sample(scores, len(scores))
    found = NO_SCORES
    for part in doubles(*shuffled).split(size):
        found = found.including(part)
    assert found.count == at_once.count
    assert found.mean == pytest.approx(at_once.mean, rel=1e-9, abs=1e-9)
    assert found.squares == pytest.approx(at_once.squares, rel=1e-9, abs=1e-9)


def test_scores_far_from_zero_keep_their_digits() -> None:
    # 2^24 + (0, 2, 2): mean 2^24 + 4/3, population variance (16/9 + 4/9 + 4/9) / 3 = 8/9. fp32 has
    # no number between 2^24 and 2^24 + 2, nor the sum of the three.
    found = NO_SCORES.including(torch.tensor([2.0**24, 2.0**24 + 2, 2.0**24 + 2]))
    assert found.mean == pytest.approx(2**24 + 4 / 3, rel=1e-15)
    assert found.std == pytest.approx(math.sqrt(8 / 9), rel=1e-7)


SCORES = doubles(10, -6, 0, 4)
ENDS = torch.tensor([T, T, T, F])
TOKENS = torch.tensor([2, 4, 4, 8])
MOMENTS = RunningMoments(count=4, mean=1.0, squares=16.0)  # std 2


# score_clip 2, a quarter for each token, and 1 for no end.
@pytest.mark.parametrize(
    ("normalization", "missing_eos", "expected"),
    [
        # As given; clipped (2, -2, 0, 2); less (1/2, 1, 1, 2): (3/2, -3, -1, 0); less 1 for the
        # last, or -1 in its place.
        ("none", "subtract", [1.5, -3, -1, -1]),
        ("none", "none", [1.5, -3, -1, 0]),
        # (s - 1) / 2 = (9/2, -7/2, -1/2, 3/2); clipped (2, -2, -1/2, 3/2); less tokens
        # (3/2, -3, -3/2, -1/2).
        ("running", "subtract", [1.5, -3, -1.5, -1.5]),
        ("running", "replace", [1.5, -3, -1.5, -1]),
        # s / 2 = (5, -3, 0, 2); clipped (2, -2, 0, 2); less tokens (3/2, -3, -1, 0).
        ("running_scale", "subtract", [1.5, -3, -1, -1]),
        ("running_scale", "replace", [1.5, -3, -1, -1]),
    ],
)
def test_normalised_then_clipped_then_penalised_then_the_end_rule(
    normalization: str, missing_eos: str, expected: list[float]
) -> None:
    config = ppo_config(
        score_normalization=normalization, score_clip=2.0, length_penalty=0.25,
        missing_eos=missing_eos, missing_eos_penalty=1.0,
    )  # fmt: skip
    assert shape_score(SCORES, ENDS, TOKENS, config, MOMENTS).tolist() == expected
    assert SCORES.tolist() == [10, -6, 0, 4]
