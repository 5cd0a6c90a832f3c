from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_rlhf.report.estimates import (
    correlate,
    describe,
    equal_mass,
    group_accuracy,
    mean_interval,
    rate_interval,
    resampled_means,
)

from ..matrix import matrix

ONE_GROUP = np.zeros(4, dtype=int)


def test_whole_clusters_are_drawn() -> None:
    # Prompt 0 has one pair, ranked right, prompt 1 three, ranked wrong. Two draws of two prompts:
    # 0 and 0 (1/4): 2 of 2 right; 0 and 1 (1/2): 1 of 4; 1 and 1 (1/4): 0 of 6.
    right, cluster = np.array([1.0, 0, 0, 0]), np.array([0, 1, 1, 1])
    means = resampled_means(right, ONE_GROUP, cluster, seed=3)[:, 0]
    values, counts = np.unique(means, return_counts=True)
    assert values.tolist() == [0.0, 0.25, 1.0]
    # 2,000 resamples: a share of 1/2 has a standard error of 0.011.
    np.testing.assert_allclose(counts / 2000, [0.25, 0.5, 0.25], atol=0.04)


def test_an_interval_needs_two_prompts_and_a_group_needs_pairs() -> None:
    right = np.array([1.0, 0.5, 0.0, 1.0])
    groups = group_accuracy(right, np.array([0, 0, 2, 2]), "abc", np.array([0, 0, 1, 2]), seed=0)
    assert [(g.label, g.pairs, g.accuracy) for g in groups] == [("a", 2, 0.75), ("c", 2, 0.5)]
    assert groups[0].interval is None
    assert groups[1].interval == (0.0, 1.0)


def test_equal_values_share_a_bin_wherever_they_stand() -> None:
    # Two bins, five values: none is smaller than 1, three are smaller than 5, four than 9.
    assert equal_mass(np.array([5.0, 1, 1, 1, 9]), 2).tolist() == [1, 0, 0, 0, 1]
    assert equal_mass(np.array([1.0, 1, 9, 5, 1]), 2).tolist() == [0, 0, 1, 1, 0]
    # Not more values than bins: a bin each.
    assert equal_mass(np.array([3.0, 1, 3, 2]), 3).tolist() == [2, 0, 2, 1]
    # Three quarters are one value: of four bins one is left for it and one for the rest.
    assert equal_mass(np.array([0.0] * 15 + [1, 2, 3, 4, 5]), 4).tolist() == [0] * 15 + [1] * 5
    assert np.bincount(equal_mass(np.arange(20.0), 10)).tolist() == [2] * 10


def test_a_correlation_with_a_constant_or_of_two_points_is_undefined() -> None:
    for values in ([0.1, 0.1, 0.1], [1.0, 2.0], []):
        found = correlate(np.array(values), np.arange(len(values), dtype=float))
        assert found == {"points": len(values), "pearson": None, "spearman": None}


def test_moments_and_histogram() -> None:
    found = describe(np.array([0.0, 1, 1, 4]), np.array([0.0, 2, 3, 4]))
    # Variance: (2.25 + 0.25 + 0.25 + 6.25) / 4 = 2.25.
    assert list(found.values()) == [4, 1.5, 1.5, 0.0, 1.0, 4.0, [3, 0, 1]]


# Coverage: in 1,000 simulated sets of differences or rates a 95% interval holds the truth in 93 to
# 97% of them; the standard error of such a share is 0.7%.

SETS = 1000
GAINS: dict[str, Callable[[np.random.Generator, int], tuple[Any, float]]] = {
    "normal": lambda g, n: (g.normal(0.3, 1, (SETS, n)), 0.3),
    "skewed": lambda g, n: (g.exponential(1, (SETS, n)), 1.0),
    # 60% of the prompts have the same response from both policies.
    "mostly the same": lambda g, n: (
        g.exponential(1, (SETS, n)) * (g.random((SETS, n)) < 0.4), 0.4
    ),
}  # fmt: skip


@pytest.mark.parametrize("prompts", matrix([32, 100], 32))
@pytest.mark.parametrize("kind", GAINS)
def test_intervals_of_means_hold_the_mean(kind: str, prompts: int) -> None:
    values, truth = GAINS[kind](np.random.default_rng(prompts), prompts)
    low, high = mean_interval(values, seed=0)
    assert 0.93 <= ((low <= truth) & (truth <= high)).mean() <= 0.97


@pytest.mark.parametrize("prompts", matrix([32, 100], 32))
@pytest.mark.parametrize("rate", [0.5, 0.85])
@pytest.mark.parametrize("samples", [1, 4])
def test_intervals_of_win_rates_hold_the_rate(rate: float, samples: int, prompts: int) -> None:
    """One pair of responses a prompt, a fifth of them ties; or four, alike within a prompt."""
    generator = np.random.default_rng(prompts)
    shape = (SETS, prompts)
    if samples == 1:
        draw = generator.random(shape)
        values = np.where(draw < 0.2, 0.5, (draw < 0.1 + rate).astype(float))
    else:
        values = generator.binomial(4, generator.beta(3 * rate, 3 - 3 * rate, shape)) / 4
    low, high = rate_interval(values, seed=0)
    assert 0.93 <= ((low <= rate) & (rate <= high)).mean() <= 0.97
    assert (low >= 0).all()
    assert (high <= 1).all()


def test_an_interval_moves_and_scales_with_its_values() -> None:
    values = np.random.default_rng(0).exponential(1, 20)
    low, high = mean_interval(values, seed=0)
    moved = mean_interval(7 - 1e6 * values, seed=0)
    np.testing.assert_allclose(moved, (7 - 1e6 * high, 7 - 1e6 * low), rtol=1e-9)


def test_equal_differences_are_certain_and_equal_wins_are_not() -> None:
    assert [float(end) for end in mean_interval(np.full(8, 0.3), seed=0)] == [0.3, 0.3]
    low, high = rate_interval(np.ones(8), seed=0)
    assert 0.5 < low < 1
    assert high == 1
