"""The KL of best-of-n sampling against closed forms."""

from __future__ import annotations

import math
import random

import pytest

from lightning_rlhf.core.best_of import best_of_kl, best_of_kl_bound


def test_bound() -> None:
    assert best_of_kl_bound(1) == 0.0
    assert best_of_kl_bound(2) == pytest.approx(math.log(2) - 1 / 2)
    assert best_of_kl_bound(8) == pytest.approx(math.log(8) - 7 / 8)


def test_two_scores() -> None:
    """Of two responses, both fail with probability 1/4: KL(Bernoulli(3/4) || Bernoulli(1/2))."""
    kl = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert best_of_kl([0.0, 1.0], 2) == pytest.approx(kl)
    assert best_of_kl([1.0, 0.0, 0.0, 1.0], 2) == pytest.approx(kl)
    unequal = 0.75**3  # all three have the score that three of four responses have
    expected = unequal * math.log(unequal / 0.75) + (1 - unequal) * math.log((1 - unequal) / 0.25)
    assert best_of_kl([5.0, 5.0, 7.0, 5.0], 3) == pytest.approx(expected)


def test_equal_scores_and_a_single_response_leave_the_policy() -> None:
    assert best_of_kl([0.5] * 8, 8) == 0.0
    assert best_of_kl([0.1, 0.2, 0.3], 1) == pytest.approx(0.0)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_it_tends_to_the_bound_and_stays_below(n: int) -> None:
    draw = random.Random(n)
    bound = best_of_kl_bound(n)
    assert best_of_kl(range(100_000), n) == pytest.approx(bound, abs=1e-2 * bound)
    for count in (n, 3 * n):
        assert 0 < best_of_kl([draw.random() for _ in range(count)], n) < bound
