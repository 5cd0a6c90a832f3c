"""Knees of curves whose knee is known, and the conclusion about a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import Float
from numpy import ndarray

from lightning_rlhf.report.diminishing import (
    FLOPS,
    GOLD,
    ITERATIONS,
    KL,
    REWARD,
    against_kl,
    measure,
    points,
)
from lightning_rlhf.report.diminishing_figure import NUMBERS, PICTURE, write_diminishing
from lightning_rlhf.report.knee import FEWEST_POINTS, fit
from lightning_rlhf.report.shapes import Basis, knee_of, knees_and_peaks, shapes

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


def power(scale: float, exponent: float) -> Function:
    return lambda u: 1 - (1 + u / scale) ** -exponent


def broken(at: float) -> Function:
    return lambda u: np.minimum(u / at, 1.0)


def gao(peak: float) -> Function:
    """d (a - b d) with d = sqrt(u), highest at `peak`."""
    return lambda u: (2 * np.sqrt(peak * u) - u) / peak


def hump(scale: float, price: float) -> Function:
    return lambda u: 1 - np.exp(-u / scale) - price * u


def drawn(generator: np.random.Generator) -> tuple[str, Function]:
    """A random curve; none of its parameters is on the list of shapes."""
    kind = generator.choice(
        ["exponential", "power", "broken", "hump", "line", "flat"],
        p=[0.25, 0.2, 0.2, 0.2, 0.1, 0.05],
    )
    if kind == "exponential":
        return kind, exponential(np.exp(generator.uniform(np.log(0.03), np.log(0.4))))
    if kind == "power":
        scale = np.exp(generator.uniform(np.log(0.005), np.log(0.1)))
        return kind, power(scale, generator.uniform(1, 3))
    if kind == "broken":
        return kind, broken(generator.uniform(0.1, 0.85))
    if kind == "hump" and generator.random() < 0.5:
        return kind, gao(generator.uniform(0.2, 0.7))
    if kind == "hump":
        return kind, hump(generator.uniform(0.05, 0.25), generator.uniform(0.2, 1))
    return kind, (lambda u: u) if kind == "line" else np.zeros_like


def noisy(f: Function, n: int, noise: float, r: float, generator: np.random.Generator) -> ndarray:
    """f at n even points, with noise of a share of its gain, correlated by r between neighbours."""
    values = f(np.linspace(0.0, 1.0, n))
    gain = f(GRID).max() - f(GRID)[0] or 1.0
    innovations = generator.normal(size=n) * noise * gain
    errors = [innovations[0]]
    for innovation in innovations[1:] * np.sqrt(1 - r * r):
        errors.append(r * errors[-1] + innovation)
    return generator.normal() + values + np.array(errors)


def test_the_knee_of_an_exponential() -> None:
    """(1 - e^(-0.1 / t)) e^(-k / t) = 0.01 (1 - e^(-1 / t)), solved for k."""
    for scale in (0.05, 0.1, 0.2):
        bought, gain = 1 - np.exp(-0.1 / scale), 1 - np.exp(-1 / scale)
        knee = scale * np.log(bought / (0.01 * gain))
        assert knee_of(exponential(scale)(GRID)[None])[0] == pytest.approx(knee, abs=2e-3)


def test_the_knees_of_straight_lines() -> None:
    """A rise that ends at m has 1% of its gain left at 0.99 m; one that never ends has no knee."""
    curves = np.stack([broken(0.3)(GRID), GRID, 0.5 * GRID + 3])
    assert knee_of(curves).tolist() == [pytest.approx(0.297, abs=2e-3), np.inf, np.inf]


def test_a_basis_holds_the_shapes_with_mean_0_and_norm_1() -> None:
    generator = np.random.default_rng(4)
    u = np.array([0.0, *np.sort(generator.random(40)), 1.0])
    expected = shapes(u) - shapes(u).mean(axis=1, keepdims=True)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    values = generator.normal(size=(3, len(u)))
    basis = Basis.of(u)
    heights = np.maximum(expected @ values.T, 0.0)
    np.testing.assert_allclose(basis.heights(values), heights, atol=1e-12)
    np.testing.assert_allclose(basis[np.array([0, 70, -1])], expected[[0, 70, -1]], atol=1e-12)


def test_every_shape_has_the_knee_of_the_slow_definition() -> None:
    every = 400
    knees, peaks = (found[::every] for found in knees_and_peaks())
    for values, knee, peak in zip(shapes(GRID)[::every], knees, peaks, strict=True):
        # Both are on grids, of 1/400 and of 1/1000.
        assert min(knee, 0.91) == pytest.approx(min(slow_knee(values), 0.91), abs=0.012)
        assert peak == pytest.approx(GRID[values.argmax()], abs=0.0036)


def test_ninety_percent_intervals_hold_the_truth() -> None:
    """200 curves; the constants of the estimator were chosen on curves of other seeds."""
    generator = np.random.default_rng(2026)
    held = []
    for seed in range(200):
        kind, f = drawn(generator)
        noise = np.exp(generator.uniform(np.log(0.02), np.log(0.15)))
        n, r = int(generator.integers(60, 121)), generator.choice([0.0, 0.3, 0.5])
        found = fit(np.arange(n), noisy(f, n, noise, r, generator), seed)
        if kind == "flat" or found is None:
            held.append(kind == "flat" and found is None)
        else:
            low, high = found.knee.interval
            held.append(low <= slow_knee(f(GRID)) <= high)
    assert 0.85 <= np.mean(held) <= 0.95


def measured_run(
    generator: np.random.Generator,
) -> tuple[str, Function, Float[ndarray, " N"], dict[str, tuple[list[int], list[float]]]]:
    """A kind and curve of reward over shares of KL, the true KL of a run, and what it measures.

    As in runs of the quickstart and the course, the KL starts slowly, then saturates and may be
    drawn back, or grows to the end; its noise is 4 to 20% of it and is shared with the reward.
    """
    kind, f = drawn(generator)
    n = int(generator.integers(50, 76))
    t = np.linspace(0.0, 1.0, n)
    kl = t ** generator.uniform(0.5, 1.5)
    if generator.random() < 0.75:
        scale = np.exp(generator.uniform(np.log(0.08), np.log(0.4)))
        kl = 1 - np.exp(-((t / scale) ** generator.uniform(1, 2.5)))
        kl *= 1 + generator.uniform(-0.3, 0.3) * np.clip((t - scale) / (1 - scale), 0, 1)
    kl *= np.exp(generator.uniform(np.log(1.5), np.log(12)))
    reached = np.maximum.accumulate(kl) if generator.random() < 0.5 else kl
    gain = f(GRID).max() - f(GRID)[0] or 1.0
    shared = generator.normal(size=n)
    own = noisy(np.zeros_like, n, 1.0, generator.choice([0.0, 0.3, 0.5]), generator)
    rho = generator.uniform(-0.2, 0.4)
    noise = np.exp(generator.uniform(np.log(0.02), np.log(0.15))) * gain
    reward = f(reached / kl.max()) + noise * (rho * shared + np.sqrt(1 - rho * rho) * own)
    seen = kl * (1 + generator.uniform(0.04, 0.2) * shared) + 0.02 * generator.normal(size=n)
    steps = list(range(1, n + 1))
    return kind, f, kl, {REWARD: (steps, list(reward)), KL: (steps, list(seen))}


def test_ninety_percent_intervals_over_kl_hold_the_truth() -> None:
    """200 runs, whose knees lie at a share of their largest true KL, in nats."""
    generator = np.random.default_rng(2027)
    held = []
    for _ in range(200):
        kind, f, kl, curves = measured_run(generator)
        found = against_kl(points(curves, REWARD, 1), points(curves, KL, 1))
        if kind == "flat" or found is None or found.fit is None:
            held.append(kind == "flat" and (found is None or found.fit is None))
        else:
            low, high = (found.at(end) for end in found.fit.knee.interval)
            assert low is not None
            held.append(low <= slow_knee(f(GRID)) * kl.max() <= (np.inf if high is None else high))
    assert 0.85 <= np.mean(held) <= 0.95


def test_a_line_has_no_knee_and_noise_no_gain() -> None:
    generator = np.random.default_rng(0)
    line = fit(np.arange(150), noisy(lambda u: u, 150, 0.05, 0.0, generator))
    assert line is not None
    assert (line.knee.at, line.knee.interval[1]) == (np.inf, np.inf)
    found = [fit(np.arange(100), generator.normal(size=100), seed) for seed in range(20)]
    assert sum(one is not None for one in found) <= 3  # 5% of 20 is 1
    fall = noisy(lambda u: -u, 100, 0.05, 0.0, generator)
    assert fit(np.arange(100), fall) is None


def test_a_hump_has_its_maximum_in_the_interval() -> None:
    values = noisy(gao(0.4), 150, 0.03, 0.0, np.random.default_rng(1))
    found = fit(np.arange(150), values)
    assert found is not None
    low, high = found.peak.interval
    assert low <= 0.4 <= high < 0.6
    assert found.knee.at < found.peak.at


@pytest.mark.parametrize(
    "y",
    [
        [], [1.0], [0.0, 1.0], [2.0] * 50, list(range(FEWEST_POINTS - 1)),
    ],
    ids=["none", "one", "two", "constant", "too few"],
)  # fmt: skip
def test_too_little_to_fit(y: list[float]) -> None:
    assert fit(np.arange(len(y), dtype=float), np.array(y)) is None


def test_x_that_stands_still_is_not_fitted_and_a_curve_without_noise_is() -> None:
    y = broken(0.5)(np.linspace(0, 1, 60))
    assert fit(np.ones(60), y) is None
    found = fit(np.arange(60), y)
    assert found is not None
    assert found.knee.interval[0] <= 0.495 <= found.knee.interval[1]


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
    found = measure(run_of(100, broken(0.5)))
    assert found.stop is not None
    low, high = found.stop.interval
    assert low <= 49.5 <= (high or 100)
    assert found.sentence.startswith(f"after iteration {found.stop} a further 10% of compute")
    assert found.gold is None
    assert found.divergence is None
    assert found.by_kl is not None
    assert found.by_kl.fit is not None
    low_kl, high_kl = found.by_kl.fit.knee.interval
    assert 10 * low_kl <= 5 <= 10 * high_kl + 0.3


def test_gold_that_falls_is_stopped_at_its_maximum() -> None:
    found = measure(run_of(150, exponential(0.3), gao(0.4)))
    assert found.gold is not None
    assert found.stop is not None
    assert found.gold.peak is not None
    low, high = found.stop.interval
    assert low <= 60 <= (high or 150) < 100
    assert low <= (found.stop.iteration or 0) <= (high or 150)
    assert found.stop == found.gold.peak
    assert found.divergence == found.gold.peak
    assert "the gold score was highest after" in found.sentence
    assert "the reward rose by" in found.sentence


def test_gold_that_rises_with_the_reward_does_not_diverge() -> None:
    found = measure(run_of(150, exponential(0.3), exponential(0.3)))
    assert found.divergence is None or found.sentence.count("rose by") == 1
    assert measure(run_of(100, lambda u: u, lambda u: u)).divergence is None


def test_few_evaluations_without_their_responses_leave_the_knee_of_the_reward() -> None:
    found = measure(run_of(100, broken(0.5), gao(0.5), every=20))
    assert found.gold is not None
    assert found.gold.fit is None
    assert found.decisive is found.reward
    assert found.stop == found.reward.knee


def test_compute_is_the_axis_where_it_was_measured_throughout() -> None:
    curves = run_of(100, broken(0.5))
    steps = curves[REWARD][0]
    curves[FLOPS] = (steps, [1e12 * step**2 for step in steps])  # later iterations cost more
    found = measure(curves)
    assert found.reward.unit == FLOPS
    assert found.reward.x[[0, 1, 10]].tolist() == [0, 1e12, 1e14]  # before the iteration
    curves[FLOPS] = (steps[50:], curves[FLOPS][1][50:])
    assert measure(curves).reward.unit == ITERATIONS


def test_rows_that_are_not_numbers_or_there_twice() -> None:
    curves = run_of(60, broken(0.5))
    expected = measure(curves).as_json()
    steps, values = curves[REWARD]
    curves[REWARD] = (
        [*steps, 30, 61, 62, 10],
        [*values, values[29], float("nan"), float("inf"), values[9]],
    )
    assert measure(curves).as_json() == expected
    for name in curves:
        curves[name] = ([1], [float("nan")])
    assert "nothing to say" in measure(curves).sentence
    assert measure({}).stop is None


def test_a_run_that_gains_nothing() -> None:
    found = measure(run_of(100, np.zeros_like))
    assert (found.stop, found.divergence) == (None, None)
    assert found.sentence == "no gain within this run: the reward did not rise beyond its noise"


@pytest.mark.parametrize("gold", [None, gao(0.4)], ids=["reward alone", "judge"])
def test_files(tmp_path: Path, gold: Function | None) -> None:
    found = write_diminishing(tmp_path, "run", run_of(100, broken(0.5), gold))
    told = json.loads((tmp_path / NUMBERS).read_text())
    assert told["sentence"] == found.sentence
    assert told["stop"]["iteration"] == found.stop.iteration
    assert [(c["metric"], c["unit"]) for c in told["curves"]] == [
        (REWARD, ITERATIONS), (REWARD, KL), *([(GOLD, ITERATIONS)] if gold else []),
    ]  # fmt: skip
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")
