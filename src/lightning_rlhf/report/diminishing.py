"""The point of diminishing returns of a PPO run: a saturating fit, a stop, and one sentence."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.optimize import OptimizeWarning, curve_fit, isotonic_regression
from scipy.signal import lfilter

from lightning_rlhf.core.errors import counted
from lightning_rlhf.report.estimates import Interval, mean_interval

REWARD, KL, GOLD = "reward_mean", "kl_divergence", "eval/judge/gold"
FLOPS, ITERATIONS = "compute/flops", "iterations"
"""Units of compute: a cumulative metric, or iterations where it was not measured."""
NAMES = {REWARD: "reward", GOLD: "gold score"}
AHEAD = 0.1
"""Share of the run's compute that is bought further."""
GAIN = 0.01
"""Share of the run's gain below which a further AHEAD of the compute is not worth it."""
LEVEL = 0.9
"""Share of runs in which an interval is to hold the truth."""
FEWEST_POINTS = 12
"""Minimum number of points; with fewer, the noise cannot be told from the curve."""

_SEED = 0
"""Seed of the bootstraps, so that the same run has the same numbers."""
_RESAMPLES = 200
_SCALES = (-5.0, 2.3)
"""Logarithms of the smallest and the largest scale of a fit, as shares of the range of x."""
_STARTS = (-3.0, -1.5, 0.0)
"""Logarithms of scales from which a fit starts."""
_FALSE_GAINS = 0.05
"""Share of runs without a gain in which one is found, at most."""

Curve = tuple[list[int], list[float]]
"""Steps and values of a metric."""
Points = tuple[Int[ndarray, " N"], Float[ndarray, " N"]]
"""Number of iterations that the policy had at each measurement, and the measured values."""
ByPrompt = Mapping[int, Float[ndarray, " N"]]
"""Iteration of an evaluation -> a score's mean over the responses to each prompt."""


@dataclass(frozen=True)
class Fit:
    """Saturating curve that fits best, over x as a share of its range, 0 to 1."""

    start: float
    gain: float
    """Fitted value at 1 less the one at 0."""
    log_scale: float
    knee: float
    """Share from which a further AHEAD buys less than GAIN of the gain; inf is beyond the run."""
    interval: Interval
    """90% interval of the knee; an end of inf is beyond the run."""

    def value(self, u: Float[ndarray, " M"]) -> Float[ndarray, " M"]:
        """Return the fitted values."""
        return saturating(u, self.start, self.gain, self.log_scale)


@dataclass(frozen=True)
class Point:
    """Iteration after which something holds, with its interval; None is beyond the run."""

    iteration: int | None
    interval: tuple[int, int | None]

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.iteration} [{low}-{'end' if high is None else high}]"


@dataclass(frozen=True)
class Frontier:
    """Curve of a metric against compute or KL."""

    metric: str
    unit: str
    """Metric on the x-axis, or ITERATIONS."""
    after: Int[ndarray, " N"]
    """Number of iterations that the policy had at each point."""
    x: Float[ndarray, " N"]
    y: Float[ndarray, " N"]
    fit: Fit | None
    """Best fit; None without a gain, or with too few points."""

    @property
    def knee(self) -> Point | None:
        """Return the knee as measured iterations; None without a fit. Ends round outwards."""
        if self.fit is None:
            return None
        low, high = (self.at(end) for end in self.fit.interval)
        before = len(self.x) if low is None else int(np.searchsorted(self.x, low, side="right"))
        first = int(self.after[max(before - 1, 0)])
        return Point(self._iteration(self.at(self.fit.knee)), (first, self._iteration(high)))

    def at(self, share: float) -> float | None:
        """Return the x at a share of its range; None beyond the run."""
        return float(self.x[0] + share * (self.x[-1] - self.x[0])) if share <= 1 else None

    def as_json(self) -> dict[str, Any]:
        """Return the knee as iterations, and as x in its unit."""
        knee, fit = self.knee, self.fit
        found = None if knee is None or fit is None else asdict(knee) | {
            "at": self.at(fit.knee), "at_interval": [self.at(end) for end in fit.interval],
        }  # fmt: skip
        return {"metric": self.metric, "unit": self.unit, "points": len(self.y), "knee": found}

    def _iteration(self, x: float | None) -> int | None:
        if x is None:
            return None
        return int(self.after[min(int(np.searchsorted(self.x, x)), len(self.x) - 1)])


@dataclass(frozen=True, kw_only=True)
class GoldStop:
    """Earliest evaluation whose gold score is as good as that of the best one and of the end."""

    step: int
    """Iteration of the evaluation at which to stop; 0 is the SFT model."""
    first: int
    """Earliest evaluation whose gold score is not below the best one's beyond the noise."""
    last: int
    """Latest such evaluation."""
    best: int
    """Evaluation with the highest gold score."""
    end: int
    """Last evaluation."""
    evaluations: int
    prompts: int
    gold: float
    """Mean gold score over prompts at `step`."""
    gold_at_best: float
    gold_at_end: float
    reward_rise: float
    """Reward at the end less the one at `step`, mean over the same prompts."""
    reward_interval: Interval
    """95% interval of `reward_rise`."""

    @property
    def point(self) -> Point:
        """Return the stop, with the evaluations that cannot be told from the best as interval."""
        return Point(self.step, (self.first, None if self.last == self.end else self.last))

    @property
    def diverges(self) -> bool:
        """Return whether the reward rose after the stop, beyond the noise; gold did not."""
        return self.reward_interval[0] > 0

    def __str__(self) -> str:
        head = f"stop at iteration {self.point} by the gold score"
        of = f"of {self.evaluations} evaluations on {counted(self.prompts, 'prompt')}"
        if self.step == self.best:
            at_end = "" if self.step == self.end else f"; at the end {self.gold_at_end:z.3g}"
            return f"{head}: {self.gold:z.3g}, the highest {of}{at_end}"
        return (
            f"{head}: {self.gold:z.3g}, the earliest {of} that is not below the highest "
            f"({self.gold_at_best:z.3g} at {self.best}) beyond the noise, nor below the end "
            f"({self.gold_at_end:z.3g})"
        )


@dataclass(frozen=True)
class Diminishing:
    """The gain from further compute in a run of PPO."""

    reward: Frontier
    by_kl: Frontier | None
    """Reward against KL; None where the KL was not measured."""
    gold: Frontier | None
    """Gold score against compute; None without a judge."""
    gold_stop: GoldStop | None
    """Stop by paired evaluations; None where the responses of fewer than two are known."""

    @property
    def decisive(self) -> Frontier:
        """Return the curve that names the knee: gold, where its gain can be measured."""
        return self.gold if self.gold is not None and self.gold.fit is not None else self.reward

    @property
    def stop(self) -> Point | None:
        """Return the stop of the paired evaluations, else the knee, else the end of the run.

        It is None without a gain.
        """
        if self.gold_stop is not None:
            return self.gold_stop.point
        if (knee := self.decisive.knee) is None or knee.iteration is not None:
            return knee
        return Point(int(self.reward.after[-1]) + 1, knee.interval)

    @property
    def divergence(self) -> Point | None:
        """Return the stop, if the reward rose after it while gold did not; else None."""
        return self.stop if self.gold_stop is not None and self.gold_stop.diverges else None

    @property
    def sentence(self) -> str:
        """Return the conclusion as one line."""
        if (count := len(self.reward.y)) < FEWEST_POINTS:
            return (
                f"nothing to say about diminishing returns: {count} of {FEWEST_POINTS} iterations"
            )
        parts = [self._knee_told()]
        if self.gold_stop is not None:
            parts.append(str(self.gold_stop))
            if self.gold_stop.diverges:
                parts.append(
                    f"from {self.gold_stop.point} on the reward rose by "
                    f"{self.gold_stop.reward_rise:.2g} and the gold score did not"
                )
        return "; ".join(parts)

    def _knee_told(self) -> str:
        knee, name = self.decisive.knee, NAMES[self.decisive.metric]
        if knee is None:
            return "no gain within this run: the reward did not rise beyond its noise"
        if knee.iteration is None:
            return (
                f"no knee within this run: to its end a further {AHEAD:.0%} of compute bought at "
                f"least {GAIN:.0%} of the gain in {name} (a knee before iteration "
                f"{knee.interval[0]} is unlikely)"
            )
        return (
            f"after iteration {knee} a further {AHEAD:.0%} of compute bought less than {GAIN:.0%} "
            f"of the gain in {name}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return all numbers; an iteration or position of None is beyond the run."""
        stop, divergence = self.stop, self.divergence
        metric = self.decisive.metric if self.gold_stop is None else GOLD
        curves = [curve for curve in (self.reward, self.by_kl, self.gold) if curve is not None]
        return {
            "sentence": self.sentence,
            "unit_of_compute": self.reward.unit,
            "share_of_compute": AHEAD,
            "share_of_gain": GAIN,
            "level": LEVEL,
            "stop": None if stop is None else {"metric": metric} | asdict(stop),
            "gold_stop": None if self.gold_stop is None else asdict(self.gold_stop),
            "divergence": None if divergence is None else asdict(divergence),
            "curves": [curve.as_json() for curve in curves],
        }


def measure(curves: Mapping[str, Curve], gold_stop: GoldStop | None = None) -> Diminishing:
    """Return what further compute bought, from the metrics of a run and its paired evaluations.

    Reward and KL of iteration t are those of the policy after t - 1 iterations, gold of step t is
    that of the policy after t. The KL on the axis is the curve closest to the measured one that
    never falls, so that noise in it does not flatten the reward. Values that are not finite are
    left out; of a step that is there twice the later one counts.
    """
    reward, kl, gold = _points(curves, REWARD, 1), _points(curves, KL, 1), _points(curves, GOLD, 0)
    steps, flops = _points(curves, FLOPS, 0)
    # Compute that was not measured from the first iteration on is no measure of the run.
    is_measured = len(steps) > 0 and set(reward[0]) - {0} <= set(steps)

    def against_compute(metric: str, measured: Points) -> Frontier:
        after, y = measured
        x = after.astype(float)
        if is_measured:
            x = np.interp(after, [0, *steps], np.maximum.accumulate([0.0, *flops]))
        return Frontier(metric, FLOPS if is_measured else ITERATIONS, after, x, y, fit(x, y))

    after, in_reward, in_kl = np.intersect1d(reward[0], kl[0], return_indices=True)
    by_kl = None
    if len(after):
        x, y = isotonic_regression(kl[1][in_kl]).x, reward[1][in_reward]
        by_kl = Frontier(REWARD, KL, after, x, y, fit(x, y))
    by_gold = against_compute(GOLD, gold) if len(gold[0]) else None
    return Diminishing(against_compute(REWARD, reward), by_kl, by_gold, gold_stop)


def saturating(
    u: Float[ndarray, " N"], start: float, gain: float, log_scale: float
) -> Float[ndarray, " N"]:
    """Return a curve that rises by `gain` from 0 to 1 and ever more slowly.

    y(u) = start + gain (1 - exp(-u / c)) / (1 - exp(-1 / c)), c = exp(log_scale)

    A large c makes it a straight line.
    """
    scale = np.exp(np.clip(log_scale, *_SCALES))
    return start + gain * np.expm1(-u / scale) / np.expm1(-1 / scale)


def knee_of(log_scale: float) -> float:
    """Return the share of the compute from which no further AHEAD buys GAIN of the gain.

        k = c log((1 - exp(-AHEAD / c)) / (GAIN (1 - exp(-1 / c)))), c = exp(log_scale)

    It is inf where less than AHEAD of the compute follows it.
    """
    scale = np.exp(np.clip(log_scale, *_SCALES))
    knee = scale * np.log(np.expm1(-AHEAD / scale) / (GAIN * np.expm1(-1 / scale)))
    return float(knee) if knee <= 1 - AHEAD else np.inf


def fit(x: Float[ndarray, " N"], y: Float[ndarray, " N"]) -> Fit | None:
    """Return the saturating curve that fits y against x best; None without a gain.

    x does not decrease. The interval holds the middle LEVEL of the knees of refits to the fitted
    curve with resampled residuals. There is a gain where the curve rises and explains more of y
    than in 95% of curves made of resampled noise that does not rise.
    """
    if len(y) < FEWEST_POINTS or not x[-1] > x[0] or np.ptp(y) == 0:
        return None
    u = (x - x[0]) / (x[-1] - x[0])
    generator = np.random.default_rng(_SEED)
    left, best = _best(u, y)
    noise = _resampled(y - y.mean(), generator)
    noise_left = [_best(u, values)[0] / np.var(values) for values in noise[: _RESAMPLES // 2]]
    if best[1] <= 0 or left / np.var(y) >= np.quantile(noise_left, _FALSE_GAINS):
        return None
    fitted = saturating(u, *best)
    residuals = (y - fitted) * np.sqrt(len(y) / (len(y) - len(best)))
    refits = [_best(u, fitted + e, best[2:])[1] for e in _resampled(residuals, generator)]
    knees = [knee_of(refit[2]) for refit in refits]
    low, high = np.quantile(knees, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2], method="nearest")
    return Fit(*best, knee_of(best[2]), (float(low), float(high)))


def _best(
    u: Float[ndarray, " N"], y: Float[ndarray, " N"], starts: Iterable[float] = _STARTS
) -> tuple[float, tuple[float, float, float]]:
    """Return the mean square that the best fit leaves, and its parameters."""
    found = [(float(np.var(y)), (float(y.mean()), 0.0, 0.0))]
    for log_scale in starts:
        first = (y[0], y[-1] - y[0], log_scale)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizeWarning)  # no covariance is used
            try:
                best, _ = curve_fit(saturating, u, y, first, ftol=1e-4, xtol=1e-4)
            except RuntimeError:  # no convergence
                continue
        left = float(np.mean((y - saturating(u, *best)) ** 2))
        found.append((left, (float(best[0]), float(best[1]), float(best[2]))))
    return min(found)


def _resampled(
    noise: Float[ndarray, " N"], generator: np.random.Generator
) -> Float[ndarray, "R N"]:
    """Return resamples with the variance of the noise and its correlation r between neighbours.

    r is the sample's correlation plus (1 + 4 r) / N, which makes up for its bias.

    Source: Bühlmann 1997, Sieve bootstrap for time series, Bernoulli 3(2); Kendall 1954, Note on
        bias in the estimation of autocorrelation, Biometrika 41
    """
    n, power = len(noise), float(noise @ noise)
    if power == 0:
        return np.zeros((_RESAMPLES, n))
    r = float(noise[1:] @ noise[:-1]) / power
    r = float(np.clip(r + (1 + 4 * r) / n, 0.0, 0.9))
    innovations = noise[1:] - r * noise[:-1]
    innovations -= innovations.mean()
    innovations *= np.sqrt(power / n * (1 - r * r) / np.mean(innovations**2))
    drawn = generator.choice(innovations, (_RESAMPLES, n))
    drawn[:, 0] /= np.sqrt(1 - r * r)
    return lfilter([1.0], [1.0, -r], drawn)


def _points(curves: Mapping[str, Curve], metric: str, ahead: int) -> Points:
    """Return the finite values of a metric and, at each, its step less `ahead`."""
    steps, values = curves.get(metric, ([], []))
    latest = dict(zip(steps, values, strict=True))
    kept = sorted(step for step, value in latest.items() if np.isfinite(value))
    after = np.array(kept, dtype=int) - ahead
    return after, np.array([latest[step] for step in kept], dtype=float)


def find_gold_stop(gold: ByPrompt, reward: ByPrompt) -> GoldStop | None:
    """Return the earliest evaluation that is as good as the best and as the end.

        stop = min {t : high(g_t - g_b) >= 0 and mean(g_t) >= mean(g_T)}

    with g_t the gold scores of the prompts in evaluation t, b the evaluation with the highest mean,
    T the last one, and high the upper end of the 95% interval of the mean of paired differences, by
    bootstrap over prompts. The best of many evaluations is partly so by luck, which makes the
    differences to it larger and the stop later, not earlier.

    gold, reward: scores in evaluations of the same prompts, in the same order; NaN for a prompt
        without a gold score, which is left out.
    Returns: None with fewer than two evaluations, or fewer than two prompts with gold in all.
    """
    steps = sorted(gold)
    if len(steps) < 2:
        return None
    scores = np.stack([gold[step] for step in steps])
    known = ~np.isnan(scores).any(axis=0)
    if known.sum() < 2:
        return None
    scores = scores[:, known]
    means = scores.mean(axis=1)
    best = int(np.argmax(means))
    _, high = mean_interval(scores - scores[best], _SEED)
    within = np.flatnonzero(high >= 0)
    stop = int(within[means[within] >= means[-1]][0])
    rise = (reward[steps[-1]] - reward[steps[stop]])[known]
    low_rise, high_rise = mean_interval(rise, _SEED)
    return GoldStop(
        step=steps[stop],
        first=steps[within[0]],
        last=steps[within[-1]],
        best=steps[best],
        end=steps[-1],
        evaluations=len(steps),
        prompts=int(known.sum()),
        gold=float(means[stop]),
        gold_at_best=float(means[best]),
        gold_at_end=float(means[-1]),
        reward_rise=float(rise.mean()),
        reward_interval=(float(low_rise), float(high_rise)),
    )
