"""How the price of KL moves from one iteration to the next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.core.kl import adapted_coef, linear_coef

from .conftest import drawn

kls = st.floats(-50, 50)


# Target 6, half a horizon of episodes: a price of 0.2 changes by 0.2 * clip(error) / 2.
@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.2),  # at the target
        (6.6, 0.21),  # a tenth above: half of a tenth dearer
        (5.4, 0.19),  # a tenth below
        (7.2, 0.22),  # a fifth above, the most that counts
        (60.0, 0.22),
        (4.8, 0.18),
        (0.0, 0.18),
        (-3.0, 0.18),  # an estimate can be negative
    ],
)
def test_adapted_by_hand(kl: float, expected: float) -> None:
    found = adapted_coef(0.2, kl, target=6.0, horizon=100.0, episodes=50)
    assert found == pytest.approx(expected, rel=1e-12)


def test_at_its_target_the_price_stays_to_the_last_bit() -> None:
    assert adapted_coef(0.1, 0.3, target=0.3, horizon=7.0, episodes=11) == 0.1


@drawn
@given(kls, kls)
def test_the_price_rises_with_the_kl(a: float, b: float) -> None:
    low, high = (
        adapted_coef(0.1, kl, target=6.0, horizon=10.0, episodes=8) for kl in sorted((a, b))
    )
    assert low <= high
    assert (high > 0.1) == (max(a, b) > 6.0)
    assert (low < 0.1) == (min(a, b) < 6.0)


def test_what_changes_it_is_episodes_over_the_horizon() -> None:
    # 20 % above for one horizon of episodes: 20 % dearer, whatever the horizon.
    for horizon in (10, 1000):
        found = adapted_coef(1.0, 100.0, target=6.0, horizon=horizon, episodes=horizon)
        assert found == pytest.approx(1.2, rel=1e-12)
    # A tenth of a horizon: a tenth of that.
    assert adapted_coef(1.0, 100.0, target=6.0, horizon=100, episodes=10) == pytest.approx(1.02)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0.4, 0.1, [0.4, 0.3, 0.2, 0.1]), (0.0, 3.0, [0, 1, 2, 3]), (0.2, 0.2, [0.2] * 4)],
)
def test_linear_by_hand(start: float, end: float, expected: list[float]) -> None:
    assert [linear_coef(start, end, i, 4) for i in range(4)] == pytest.approx(expected, rel=1e-12)


def test_a_run_of_one_iteration_has_the_price_it_starts_with() -> None:
    assert linear_coef(0.4, 0.1, 0, 1) == 0.4
