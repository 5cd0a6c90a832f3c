"""The score as it is paid: running moments, and the order of normalising, clipping and pricing."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.config import Normalization, Term
from lightning_rlhf.core.shaping import NO_SCORES, RunningMoments, shape_score

from .configs import ppo_config
from .conftest import F, Ragged, T, close, drawn, ragged

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
@given(numbers)
def test_one_batch_has_the_population_moments(scores: list[float]) -> None:
    std, mean = torch.std_mean(doubles(*scores), correction=0)
    found = NO_SCORES.including(doubles(*scores))
    assert found.mean == pytest.approx(mean.item(), rel=1e-9, abs=1e-9)
    assert math.sqrt(found.squares / found.count) == pytest.approx(std.item(), rel=1e-9, abs=1e-9)


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


SCORE = doubles(10, -6, 0, 4)
ENDED = torch.tensor([T, T, T, F])
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
def test_normalised_then_clipped_then_priced_then_the_end_rule(
    normalization: str, missing_eos: str, expected: list[float]
) -> None:
    config = ppo_config(
        score_normalization=normalization, score_clip=2.0, length_penalty=0.25,
        missing_eos=missing_eos, missing_eos_penalty=1.0,
    )  # fmt: skip
    assert shape_score(SCORE, ENDED, TOKENS, config, MOMENTS).tolist() == expected
    assert SCORE.tolist() == [10, -6, 0, 4]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [10, -6, 0, 4]),
        ({"score_normalization": "running"}, [4.5, -3.5, -0.5, 1.5]),
        ({"score_normalization": "running_scale"}, [5, -3, 0, 2]),
        ({"score_clip": 5.0}, [5, -5, 0, 4]),
        ({"length_penalty": 0.5}, [9, -8, -2, 0]),
        ({"missing_eos": "subtract", "missing_eos_penalty": 3.0}, [10, -6, 0, 1]),
        ({"missing_eos": "replace", "missing_eos_penalty": 3.0}, [10, -6, 0, -3]),
    ],
)
def test_one_rule_at_a_time(changes: dict[str, Any], expected: list[float]) -> None:
    assert shape_score(SCORE, ENDED, TOKENS, ppo_config(**changes), MOMENTS).tolist() == expected


@drawn
@given(ragged(), st.sampled_from(["none", "running", "running_scale"]), st.floats(0.1, 3))
def test_rows_and_parts(batch: Ragged, normalization: str, score_clip: float) -> None:
    config = ppo_config(
        score_normalization=normalization, score_clip=score_clip, length_penalty=0.25,
        missing_eos="subtract",
    )  # fmt: skip
    rows = (batch.row_normal(0), batch.row_normal(1) > 0, torch.tensor(batch.lengths))
    whole, order = shape_score(*rows, config, MOMENTS), batch.shuffled_rows()
    shuffled = shape_score(*(x[order] for x in rows), config, MOMENTS)
    assert torch.equal(shuffled, whole[order])
    parts = zip(*(x.split(1) for x in rows), strict=True)
    assert torch.equal(torch.cat([shape_score(*p, config, MOMENTS) for p in parts]), whole)


def test_normalising_by_the_moments_of_a_batch_whitens_it() -> None:
    moments = NO_SCORES.including(SCORE)
    config = ppo_config(score_normalization="running")
    found = shape_score(SCORE, ENDED, TOKENS, config, moments)
    close(found.mean(), doubles(0)[0])
    close(found.std(correction=0), doubles(1)[0])


@pytest.mark.parametrize(
    ("normalization", "clip", "expected"),
    [("none", None, True), ("stored", None, True), ("running", None, False), ("none", 1.0, False)],
)
def test_a_component_is_paid_as_reported_unless_moments_or_a_clip_change_it(
    normalization: Normalization, clip: float | None, expected: bool
) -> None:
    term = Term(name="a", weight=2.0, normalization=normalization, clip=clip)
    assert term.is_paid_as_reported == expected
