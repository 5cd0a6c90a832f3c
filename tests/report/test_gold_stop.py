"""The stop by paired evaluations: known differences, and recorded runs without the KL penalty."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from numpy import ndarray

from lightning_rlhf.report.diminishing import measure
from lightning_rlhf.report.gold_stop import GoldStop, find_gold_stop

from .test_diminishing import broken, run_of

RECORDED = Path(__file__).parent / "recorded_gold.csv"
"""Gold and reward of each held-out prompt in runs of the quickstart with ppo.kl_coef=0."""


def level(value: float) -> ndarray:
    return np.full(8, value)


def noisy(value: float) -> ndarray:
    """Mean `value`; its differences to a level have a standard error of 0.5 / sqrt(7) = 0.19."""
    return value + 0.5 * np.array([1.0, -1.0] * 4)


def found(*gold: ndarray, reward: tuple[ndarray, ...] | None = None) -> GoldStop | None:
    """The stop of evaluations after 0, 10, 20, ... iterations; the reward stays unless given."""
    rewards = reward or tuple(level(0.0) for _ in gold)
    by_step = [dict(zip(range(0, 1000, 10), rows, strict=False)) for rows in (gold, rewards)]
    return find_gold_stop(*by_step)


def test_differences_without_noise_leave_the_best_alone() -> None:
    stop = found(level(0.0), level(0.99), level(1.0), level(0.8))
    assert (stop.first, stop.step, stop.last, stop.best, stop.end) == (20, 20, 20, 20, 30)
    assert str(stop) == (
        "stop at iteration 20 [20-20] by the gold score: 1, the highest of 4 evaluations on 8 "
        "prompts; at the end 0.8"
    )


def test_the_earliest_within_the_noise() -> None:
    """0.1 below the best is half a standard error, 0.9 is nearly five."""
    stop = found(noisy(0.1), noisy(0.9), level(1.0), level(0.8))
    assert (stop.first, stop.step, stop.last, stop.best) == (10, 10, 20, 20)
    assert str(stop) == (
        "stop at iteration 10 [10-20] by the gold score: 0.9, the earliest of 4 evaluations on 8 "
        "prompts that is not below the highest (1 at 20) beyond the noise, nor below the end (0.8)"
    )


def test_the_stop_is_not_below_the_end() -> None:
    stop = found(noisy(0.1), noisy(0.9), level(1.0), noisy(0.95))
    assert (stop.first, stop.step, stop.last) == (10, 20, 30)
    rising = found(noisy(0.1), noisy(0.9), level(1.0))
    assert (rising.first, rising.step, rising.last) == (10, 20, 20)
    assert str(rising).endswith("[10-end] by the gold score: 1, the highest of 3 evaluations on 8 "
                                "prompts")  # fmt: skip


def test_a_run_that_only_loses_stops_before_it_begins() -> None:
    assert found(level(1.0), noisy(0.5), noisy(0.2)).step == 0


def test_the_reward_that_rises_after_the_stop_diverges() -> None:
    gold = (level(0.0), level(1.0), level(0.8))
    for rise, noise, diverges in ((1.0, noisy, True), (0.1, noisy, False), (-1.0, level, False)):
        stop = found(*gold, reward=(level(0.0), level(0.0), noise(rise)))
        assert stop.diverges is diverges
        assert stop.reward_rise == pytest.approx(rise)


def test_prompts_without_gold_are_left_out() -> None:
    """With prompts 0 and 1, the only ones judged in both, the first evaluation is the best."""
    first = np.array([1.0, 1.0, np.nan, 0.0])
    second = np.array([0.5, 0.5, 9.0, np.nan])
    stop = find_gold_stop({0: first, 10: second}, {0: first * 0, 10: np.array([1.0, 1.0, 5, 5])})
    assert (stop.step, stop.prompts, stop.reward_rise) == (0, 2, 1.0)


@pytest.mark.parametrize(
    "gold", [{}, {0: level(1.0)}, {0: level(1.0)[:1], 10: level(2.0)[:1]}, {0: level(np.nan)}]
)
def test_too_little_to_pair(gold: dict[int, ndarray]) -> None:
    assert find_gold_stop(gold, gold) is None


def test_it_names_the_stop_of_a_run() -> None:
    curves = run_of(100, broken(0.5))
    gold = {0: level(0.0), 50: level(1.0), 100: level(0.9)}
    rising = {0: level(0.0), 50: level(0.0), 100: level(0.25)}
    run = measure(curves, find_gold_stop(gold, rising))
    assert str(run.stop) == "50 [50-50]"
    assert run.divergence == run.stop
    assert run.sentence.endswith(
        "from 50 [50-50] on the reward rose by 0.25 and the gold score did not"
    )
    told = run.as_json()
    assert told["stop"] == {"metric": "eval/judge/gold", "iteration": 50, "interval": (50, 50)}
    assert told["gold_stop"]["gold_at_end"] == pytest.approx(0.9)
    still = measure(run_of(100, np.zeros_like), find_gold_stop(gold, gold))
    assert still.sentence.startswith("no gain within this run")
    assert str(still.gold_stop) in still.sentence


def test_without_a_penalty_gold_at_the_stop_is_at_least_that_of_the_end() -> None:
    """Six evaluations of each of three seeds, as the quickstart makes them."""
    scores: dict[tuple[str, str], dict[int, ndarray]] = {}
    for seed, iteration, score, *by_prompt in list(csv.reader(RECORDED.open()))[1:]:
        scores.setdefault((seed, score), {})[int(iteration)] = np.array(by_prompt, float)
    stops = []
    for seed in "012":
        gold, reward = scores[seed, "gold"], scores[seed, "reward"]
        stop = find_gold_stop(gold, reward)
        assert stop.evaluations == 6
        assert gold[stop.step].mean() >= gold[150].mean()
        stops.append(stop.step)
    assert stops == [120, 120, 150]
