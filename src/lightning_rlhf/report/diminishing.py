"""The point of diminishing returns of a PPO run: a saturating fit, a stop, and one sentence."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter
from numpy import ndarray
from scipy.optimize import OptimizeWarning, curve_fit, isotonic_regression
from scipy.signal import lfilter

from lightning_rlhf.core.errors import counted
from lightning_rlhf.core.metrics import FLOPS, GOLD, KL, REWARD
from lightning_rlhf.report.curves import BLUE, ORANGE
from lightning_rlhf.report.estimates import Interval, mean_interval, single
from lightning_rlhf.report.figures import GREY, LEGEND, ROW_IN, WIDTH_IN, head

ITERATIONS = "iterations"
"""Unit of compute where FLOPS, a cumulative metric, was not measured."""
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

Curve = tuple[Sequence[int], Sequence[float]]
"""Steps and values of a metric."""
Points = tuple[Int[ndarray, " N"], Float[ndarray, " N"]]
"""Number of iterations that the policy had at each measurement, and the measured values."""
ByPrompt = Mapping[int, Float[ndarray, " N"]]
"""Iteration of an evaluation -> a score's mean over the responses to each prompt."""


@dataclass(frozen=True)
class Fit:
    """Saturating curve that fits best, over x as a share of its range, 0 to 1."""

    curve: tuple[float, float, float]
    """Start, gain and logarithm of the scale of `saturating`."""
    knee: float
    """Share from which a further AHEAD buys less than GAIN of the gain; inf is beyond the run."""
    interval: Interval
    """90% interval of the knee; an end of inf is beyond the run."""


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
        low, high, knee = map(self.at, (*self.fit.interval, self.fit.knee))
        before = len(self.x) if low is None else int(np.searchsorted(self.x, low, side="right"))
        last, until = (
            None if x is None else int(self.after[min(place, len(self.x) - 1)])
            for x, place in ((x, int(np.searchsorted(self.x, x or 0))) for x in (knee, high))
        )
        return Point(last, (int(self.after[max(before - 1, 0)]), until))

    def at(self, share: float) -> float | None:
        """Return the x at a share of its range; None beyond the run."""
        return float(self.x[0] + share * (self.x[-1] - self.x[0])) if share <= 1 else None

    def as_json(self) -> dict[str, Any]:
        """Return the knee as iterations, and as x in its unit."""
        found = None
        if (knee := self.knee) is not None and self.fit is not None:
            ends = [self.at(end) for end in self.fit.interval]
            found = asdict(knee) | {"at": self.at(self.fit.knee), "at_interval": ends}
        return {"metric": self.metric, "unit": self.unit, "points": len(self.y), "knee": found}


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
            words = f"{head}: {self.gold:z.3g}, the highest {of}{at_end}"
        else:
            words = (
                f"{head}: {self.gold:z.3g}, the earliest {of} that is not below the highest "
                f"({self.gold_at_best:z.3g} at {self.best}) beyond the noise, nor below the end "
                f"({self.gold_at_end:z.3g})"
            )
        rise = f"from {self.point} on the reward rose by {self.reward_rise:.2g} and the gold score "
        return f"{words}; {rise}did not" if self.diverges else words


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
    def sentence(self) -> str:
        """Return the conclusion as one line."""
        if (count := len(self.reward.y)) < FEWEST_POINTS:
            return (
                f"nothing to say about diminishing returns: {count} of {FEWEST_POINTS} iterations"
            )
        knee, name = self.decisive.knee, NAMES[self.decisive.metric]
        if knee is None:
            words = "no gain within this run: the reward did not rise beyond its noise"
        elif knee.iteration is None:
            words = (
                f"no knee within this run: to its end a further {AHEAD:.0%} of compute bought at "
                f"least {GAIN:.0%} of the gain in {name} (a knee before iteration "
                f"{knee.interval[0]} is unlikely)"
            )
        else:
            words = (
                f"after iteration {knee} a further {AHEAD:.0%} of compute bought less than "
                f"{GAIN:.0%} of the gain in {name}"
            )
        return words if self.gold_stop is None else f"{words}; {self.gold_stop}"

    def as_json(self) -> dict[str, Any]:
        """Return all numbers; an iteration or position of None is beyond the run.

        `divergence` is the stop, if the reward rose after it while gold did not; else None.
        """
        stop, by_gold = self.stop, self.gold_stop
        metric = self.decisive.metric if by_gold is None else GOLD
        curves = [curve for curve in (self.reward, self.by_kl, self.gold) if curve is not None]
        diverges = by_gold is not None and by_gold.diverges
        return {
            "sentence": self.sentence,
            "unit_of_compute": self.reward.unit,
            "share_of_compute": AHEAD,
            "share_of_gain": GAIN,
            "level": LEVEL,
            "stop": None if stop is None else {"metric": metric} | asdict(stop),
            "gold_stop": None if by_gold is None else asdict(by_gold),
            "divergence": asdict(stop) if diverges and stop is not None else None,
            "curves": [curve.as_json() for curve in curves],
        }


def measure_returns(curves: Mapping[str, Curve], gold_stop: GoldStop | None = None) -> Diminishing:
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
    return Fit(best, knee_of(best[2]), (float(low), float(high)))


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
        reward_interval=single(mean_interval(rise, _SEED)),
    )


def draw_diminishing(found: Diminishing, title: str) -> Figure:
    """Return the figure: reward, and gold where there is one, against compute, with their fits."""
    figure = Figure(figsize=(WIDTH_IN, ROW_IN + 1.4), layout=ConstrainedLayoutEngine())
    head(figure, f"{title}. {found.sentence[:1].upper()}{found.sentence[1:]}")
    axes = figure.subplots()
    axes.set_ylabel("score")
    axes.set_xlabel("iterations of training")
    if found.reward.unit == FLOPS:
        axes.set_xlabel("floating-point operations")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for curve, color in ((found.reward, BLUE), (found.gold, ORANGE)):
        if curve is None:
            continue
        name = NAMES[curve.metric]
        axes.plot(curve.x, curve.y, "o", color=color, markersize=4, alpha=0.45, label=name)
        if curve.fit is None:
            continue
        shares, span = np.linspace(0.0, 1.0, 400), curve.x[-1] - curve.x[0]
        axes.plot(curve.x[0] + shares * span, saturating(shares, *curve.fit.curve), color=color,
                  label=f"fit of {name}")  # fmt: skip
        if curve is found.decisive:
            low, high = (curve.x[0] + min(end, 1.0) * span for end in curve.fit.interval)
            label = f"knee of {name}: iteration {curve.knee}"
            axes.axvspan(low, high, color=GREY, alpha=0.15, linewidth=0, label=label)
            if (at := curve.at(curve.fit.knee)) is not None:
                axes.axvline(at, color=GREY, linewidth=1, linestyle="--")
    if (stop := found.gold_stop) is not None and found.gold is not None:
        at = found.gold.after == stop.step
        axes.plot(found.gold.x[at], found.gold.y[at], "o", color=GREY, markersize=9,
                  fillstyle="none", label=f"stop: iteration {stop.step}")  # fmt: skip
    axes.legend(ncols=6, handlelength=1.4, **LEGEND)
    return figure
