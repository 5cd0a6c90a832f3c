"""Means over seeds, and rewards at equal KL, computed by hand."""

from __future__ import annotations

import math

import pytest

from lightning_rlhf.evaluation.compare import at_kl, common_kls, over_seeds


def test_the_interval_of_three_seeds() -> None:
    """1, 2, 3: mean 2, s = 1, 4.30265 / sqrt(3) = 2.48414."""
    assert over_seeds([1.0, 2.0, math.nan, 3.0]) == "2.000 [-0.484, 4.484]"


def test_one_seed_has_no_interval_and_none_no_mean() -> None:
    assert over_seeds([1.5, math.nan]) == "1.500"
    assert over_seeds([math.nan]) == "-"


def test_a_reward_between_two_evaluations() -> None:
    """From KL 1 to 3 the reward goes from 0 to 1: 0.25 at 1.5. Later KLs fall back and do not
    count."""
    path = [(0.0, -1.0), (1.0, 0.0), (3.0, 1.0), (1.0, 9.0)]
    assert at_kl(path, 1.5) == pytest.approx(0.25)
    assert at_kl(path, 0.5) == pytest.approx(-0.5)
    assert math.isnan(at_kl(path, 3.1))


def test_common_kls_reach_as_far_as_every_run() -> None:
    runs = [[(0.0, 1.0), (2.0, 1.0)], [(0.0, 1.0), (5.0, 1.0), (4.0, 1.0)]]
    assert common_kls(runs) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert common_kls([[(0.0, 1.0)]]) == []
