"""Knees of curves whose knee is known, and the conclusion about a run."""

import csv
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import Float
from numpy import ndarray

from lightning_rlhf.core.metrics import FLOPS, GOLD, KL, REWARD
from lightning_rlhf.evaluation.diminishing import (
    FEWEST_POINTS,
    ITERATIONS,
    GoldStop,
    conclude,
    find_gold_stop,
    fit,
    knee_of,
    measure_returns,
)

from ..matrix import matrix

Function = Callable[[Float[ndarray, " N"]], Float[ndarray, " N"]]
GRID = np.linspace(0.0, 1.0, 1001)


def slow_knee(values: Float[ndarray, " G"]) -> float:
    """The definition, word for word: the first point from which no tenth of the compute buys 1%.

    values: those of the curve on GRID.
    """
    least = 0.01 * (values.max() - values[0])
    knee = np.inf
    for start in range(900, -1, -1):
        if values[start : start + 101].max() - values[start] >= least:
            break
        knee = GRID[start]
    return float(knee)


def exponential(scale: float) -> Function:
    return lambda u: 1 - np.exp(-u / scale)


def noisy(f: Function, n: int, noise: float, r: float, generator: np.random.Generator) -> ndarray:
    """f at n even points, with noise of a share of its gain, correlated by r between neighbours."""
    values = f(np.linspace(0.0, 1.0, n))
    gain = f(GRID).max() - f(GRID)[0] or 1.0
    innovations = generator.normal(size=n) * noise * gain
    errors = [innovations[0]]
    for innovation in innovations[1:] * np.sqrt(1 - r * r):
        errors.append(r * errors[-1] + innovation)
    return generator.normal() + values + np.array(errors)


def test_the_knee_is_that_of_the_slow_definition() -> None:
    for scale in (0.01, 0.05, 0.1, 0.2, 0.28, 0.4, 5.0):
        slow = slow_knee(exponential(scale)(GRID))
        assert knee_of(scale) == pytest.approx(slow, abs=2e-3)
    assert knee_of(0.4) == np.inf


def covered(curves: int, seed: int, over_kl: bool) -> float:
    """The share of intervals that hold the knee; a twentieth of the curves are straight lines.

    The KL grows like 1 - exp(-(t / s)^k), which starts slowly with k above 1, with noise of 4 to
    10% of it.
    """
    generator, found = np.random.default_rng(seed), []
    for _ in range(curves):
        scale = np.exp(generator.uniform(np.log(0.03), np.log(0.4)))
        f = exponential(scale) if generator.random() < 0.95 else (lambda u: u)
        noise = np.exp(generator.uniform(np.log(0.02), np.log(0.15)))
        n, r = int(generator.integers(50, 101)), generator.choice([0.0, 0.3, 0.5])
        steps, t, knee = list(range(1, n + 1)), np.linspace(0.0, 1.0, n), slow_knee(f(GRID))
        if over_kl:
            late = generator.uniform(0.2, 0.5)
            kl = 8 * (1 - np.exp(-((t / late) ** generator.uniform(1.0, 2.0))))
            knee *= kl.max()
            reward = f(kl / kl.max()) + noisy(np.zeros_like, n, noise, r, generator)
            kl = kl * (1 + generator.uniform(0.04, 0.1) * generator.normal(size=n))
            curve = measure_returns({REWARD: (steps, list(reward)), KL: (steps, list(kl))}).by_kl
            assert curve is not None
        else:
            reward = list(noisy(f, n, noise, r, generator))
            curve = measure_returns({REWARD: (steps, reward)}).reward
            knee *= n - 1
        assert curve.fit is not None
        low, high = curve.at(curve.fit.interval)
        found.append(low <= knee + 1e-9 and knee <= high + 1e-9)
    return float(np.mean(found))


@pytest.mark.parametrize("over_kl", matrix([False, True], True))
def test_ninety_percent_intervals_hold_the_truth(over_kl: bool) -> None:
    """Of 200 curves 89.5% do, over KL 89%; 40 have a standard error of 5%."""
    assert covered(40, 2026, over_kl) >= 0.8


def test_a_line_has_no_knee_and_noise_no_gain() -> None:
    generator = np.random.default_rng(0)
    line = fit(np.arange(150), noisy(lambda u: u, 150, 0.05, 0.0, generator))
    assert line is not None
    assert (line.knee, line.interval[1]) == (np.inf, np.inf)
    found = [fit(np.arange(100), generator.normal(size=100)) for _ in range(20)]
    assert sum(one is not None for one in found) <= 3  # 5% of 20 is 1
    fall = noisy(lambda u: -u, 100, 0.05, 0.0, generator)
    assert fit(np.arange(100), fall) is None


def test_what_cannot_be_fitted_and_a_curve_without_noise() -> None:
    y = exponential(0.1)(np.linspace(0, 1, 60))
    for x, values in ((range(50), [2.0] * 50), (range(FEWEST_POINTS - 1),) * 2, ([1.0] * 60, y)):
        assert fit(np.array(x, float), np.array(values, float)) is None
    found = fit(np.arange(60), y)
    assert found is not None
    assert found.knee == pytest.approx(knee_of(0.1), rel=1e-3)


# A run.


def run_of(n: int, reward: Function, gold: Function | None = None, every: int = 5) -> dict:
    """The curves of a run of n iterations; the KL is its share of 10 nats."""
    generator = np.random.default_rng(3)
    steps = list(range(1, n + 1))
    before = (np.array(steps) - 1) / n
    curves = {
        REWARD: (steps, list(reward(before) + 0.03 * generator.normal(size=n))),
        KL: (steps, list(10 * before + 0.1 * generator.normal(size=n))),
    }
    if gold is not None:
        at = list(range(0, n + 1, every))
        values = gold(np.array(at) / n) + 0.02 * generator.normal(size=len(at))
        curves[GOLD] = (at, list(values))
    return curves


def test_a_run_without_a_judge() -> None:
    """The knee of scale 0.1 lies at 0.415 of the range."""
    found = measure_returns(run_of(100, exponential(0.1)))
    conclusion = conclude(found)
    low, high = conclusion["stop"]["interval"]
    assert low <= 41.5 <= (high or 100)
    assert conclusion["sentence"].startswith(
        f"after iteration {found.reward.knee} a further 10% of compute bought less than 1%"
    )
    assert (found.gold, conclusion["divergence"]) == (None, None)
    assert found.by_kl is not None
    assert found.by_kl.fit is not None
    low_kl, high_kl = found.by_kl.fit.interval
    assert 10 * low_kl <= 4.15 <= 10 * high_kl + 0.3


def test_gold_with_a_gain_decides() -> None:
    found = measure_returns(run_of(150, lambda u: u, exponential(0.05)))
    conclusion = conclude(found)
    assert conclusion["stop"] == {"metric": GOLD, **asdict(found.gold.knee)}
    assert conclusion["sentence"].endswith("of the gain in gold score")
    few = measure_returns(run_of(100, exponential(0.1), exponential(0.1), every=20))
    assert few.gold.fit is None
    assert conclude(few)["stop"] == {"metric": REWARD, **asdict(few.reward.knee)}


def test_compute_is_the_axis_where_it_was_measured_throughout() -> None:
    curves = run_of(100, exponential(0.1))
    steps = curves[REWARD][0]
    curves[FLOPS] = (steps, [1e12 * step**2 for step in steps])  # later iterations cost more
    found = measure_returns(curves)
    assert found.reward.unit == FLOPS
    assert found.reward.x[[0, 1, 10]].tolist() == [0, 1e12, 1e14]  # before the iteration
    curves[FLOPS] = (steps[50:], curves[FLOPS][1][50:])
    assert measure_returns(curves).reward.unit == ITERATIONS


def test_rows_that_are_not_numbers_or_there_twice() -> None:
    curves = run_of(60, exponential(0.1))
    expected = conclude(measure_returns(curves))
    steps, values = curves[REWARD]
    curves[REWARD] = (
        [*steps, 30, 61, 62, 10],
        [*values, values[29], float("nan"), float("inf"), values[9]],
    )
    assert conclude(measure_returns(curves)) == expected
    for name in curves:
        curves[name] = ([1], [float("nan")])
    still = conclude(measure_returns(curves))
    assert (still["stop"], still["divergence"]) == (None, None)
    assert still["sentence"] == "no gain within this run: the reward did not rise beyond its noise"
    assert conclude(measure_returns({}))["stop"] is None


# The stop by paired evaluations.

RECORDED = Path(__file__).parent / "recorded_gold.csv"
"""Gold and reward of each held-out prompt in runs of the quickstart with ppo.kl_coef=0."""


def level(value: float) -> ndarray:
    return np.full(8, value)


def spread(value: float) -> ndarray:
    """Mean `value`; its differences to a level have a standard error of 0.5 / sqrt(7) = 0.19."""
    return value + 0.5 * np.array([1.0, -1.0] * 4)


def stop_of(*gold: ndarray, reward: tuple[ndarray, ...] | None = None) -> GoldStop | None:
    """The stop of evaluations after 0, 10, 20, ... iterations; the reward stays unless given."""
    rewards = reward or tuple(level(0.0) for _ in gold)
    by_step = [dict(zip(range(0, 1000, 10), rows, strict=False)) for rows in (gold, rewards)]
    return find_gold_stop(*by_step)


def test_the_stop_is_the_earliest_within_the_noise_and_not_below_the_end() -> None:
    """After 0, 10, 20 and 30 iterations; 0.1 below the best is half a standard error."""
    for gold, stop in (
        ((level(0.0), level(0.99), level(1.0), level(0.8)), "20 [20-20]"),  # no noise
        ((spread(0.1), spread(0.9), level(1.0), level(0.8)), "10 [10-20]"),
        ((spread(0.1), spread(0.9), level(1.0), spread(0.95)), "20 [10-end]"),  # not below the end
    ):
        found = stop_of(*gold)
        assert (str(found.stop), found.best) == (stop, 20)
    assert str(found) == (
        "after iteration 20 [10-end] the gold score gained nothing beyond the noise: it is 1 there,"
        " 1 at best, at 20, and 0.95 at the end, in 4 evaluations on 8 prompts"
    )


def test_the_reward_that_rises_after_the_stop_diverges() -> None:
    gold = (level(0.0), level(1.0), level(0.8))
    for rise, noise, diverges in ((1.0, spread, True), (0.1, spread, False), (-1.0, level, False)):
        stop = stop_of(*gold, reward=(level(0.0), level(0.0), noise(rise)))
        assert stop.diverges is diverges
        assert stop.reward_rise == pytest.approx(rise)


def test_prompts_without_gold_are_left_out() -> None:
    """With prompts 0 and 1, the only ones judged in both, the first evaluation is the best."""
    first = np.array([1.0, 1.0, np.nan, 0.0])
    second = np.array([0.5, 0.5, 9.0, np.nan])
    stop = find_gold_stop({0: first, 10: second}, {0: first * 0, 10: np.array([1.0, 1.0, 5, 5])})
    assert (stop.stop.iteration, stop.prompts, stop.reward_rise) == (0, 2, 1.0)


def test_too_little_to_pair() -> None:
    for gold in ({}, {0: level(1.0)}, {0: level(1.0)[:1], 10: level(2.0)[:1]}):
        assert find_gold_stop(gold, gold) is None


def test_without_a_penalty_gold_at_the_stop_is_at_least_that_of_the_end() -> None:
    """Six evaluations of each of three seeds, as the quickstart makes them."""
    scores: dict[tuple[str, str], dict[int, ndarray]] = {}
    for seed, iteration, score, *by_prompt in list(csv.reader(RECORDED.open()))[1:]:
        scores.setdefault((seed, score), {})[int(iteration)] = np.array(by_prompt, float)
    stops = []
    for seed in "012":
        gold = scores[seed, "gold"]
        stop = find_gold_stop(gold, scores[seed, "reward"])
        assert gold[stop.stop.iteration].mean() >= gold[150].mean()
        stops.append(stop.stop.iteration)
    assert stops == [120, 120, 150]
