"""The point of diminishing returns of a PPO run: a saturating fit, a stop, and one sentence.

diminishing.json and diminishing.png in the run's folder, and a line on the console.
"""

import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.optimize import OptimizeWarning, curve_fit, isotonic_regression
from scipy.signal import lfilter

from lightning_rlhf.core.errors import CheckpointError, counted
from lightning_rlhf.core.metrics import FLOPS, GOLD, KL, REWARD
from lightning_rlhf.evaluation.gold_stop import SEED, GoldStop, Point, paired_stop
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import read_text, written_whole
from lightning_rlhf.io.user_code import nearest_path
from lightning_rlhf.report.curves import PALETTE, PURPLE, Curves, Plot, Series, frontier_plots
from lightning_rlhf.report.estimates import Interval
from lightning_rlhf.report.figures import draw_plots
from lightning_rlhf.runs.folders import METRICS
from lightning_rlhf.runs.measured import damage_named, read_metrics

NUMBERS, PICTURE = "diminishing.json", "diminishing.png"
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

_RESAMPLES = 200
_SCALES = (-5.0, 2.3)
"""Logarithms of the smallest and the largest scale of a fit, as shares of the range of x."""
_STARTS = (-3.0, -1.5, 0.0)
"""Logarithms of scales from which a fit starts."""
_FALSE_GAINS = 0.05
"""Share of runs without a gain in which one is found, at most."""


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
        places = [None if x is None else int(np.searchsorted(self.x, x)) for x in (knee, high)]
        last, until = (None if k is None else int(self.after[min(k, len(self.x) - 1)])
                       for k in places)  # fmt: skip
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


def measure_returns(curves: Curves, gold_stop: GoldStop | None = None) -> Diminishing:
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

    def against_compute(metric: str, after: ndarray, y: ndarray) -> Frontier:
        x = after.astype(float)
        if is_measured:
            x = np.interp(after, [0, *steps], np.maximum.accumulate([0.0, *flops]))
        return Frontier(metric, FLOPS if is_measured else ITERATIONS, after, x, y, fit(x, y))

    after, in_reward, in_kl = np.intersect1d(reward[0], kl[0], return_indices=True)
    by_kl = None
    if len(after):
        x, y = isotonic_regression(kl[1][in_kl]).x, reward[1][in_reward]
        by_kl = Frontier(REWARD, KL, after, x, y, fit(x, y))
    by_gold = against_compute(GOLD, *gold) if len(gold[0]) else None
    return Diminishing(against_compute(REWARD, *reward), by_kl, by_gold, gold_stop)


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
    generator = np.random.default_rng(SEED)
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


def _points(
    curves: Curves, metric: str, ahead: int
) -> tuple[Int[ndarray, " N"], Float[ndarray, " N"]]:
    """Return the finite values of a metric and, at each, its step less `ahead`."""
    steps, values = curves.get(metric, ([], []))
    latest = dict(zip(steps, values, strict=True))
    kept = sorted(step for step, value in latest.items() if np.isfinite(value))
    after = np.array(kept, dtype=int) - ahead
    return after, np.array([latest[step] for step in kept], dtype=float)


def pictured(found: Diminishing, curves: Curves) -> list[Plot]:
    """Return the plots of the frontiers, with the fits over compute."""
    *others, by_compute = frontier_plots(curves, found.as_json())
    fits = []
    for curve, color in ((found.reward, PURPLE), (found.gold, PALETTE[4])):
        if curve is not None and curve.fit is not None:
            u = np.linspace(0.0, 1.0, 400)
            x, y = curve.x[0] + u * (curve.x[-1] - curve.x[0]), saturating(u, *curve.fit.curve)
            label, line = f"fit of {NAMES[curve.metric]}", list(zip(x, y, strict=True))
            fits.append(Series(label=label, color=color, points=line))
    return [*others, replace(by_compute, series=[*by_compute.series, *fits])]


def print_diminishing(folder: Path, title: str) -> bool:
    """Write diminishing.json and diminishing.png into a run's folder, and print the conclusion.

    Return False, with nothing written or printed, where the run has fewer than FEWEST_POINTS
    iterations.

    title: name of the run.
    Raises CheckpointError where the folder or its metrics.csv is damaged.
    """
    curves = read_metrics(folder)
    if len(curves.get(REWARD, ((), ()))[0]) < FEWEST_POINTS:
        return False
    found = measure_returns(curves, paired_stop(folder))
    with written_whole(folder / NUMBERS) as beside:
        text = json.dumps(found.as_json(), indent=1, allow_nan=False)
        beside.write_text(text + "\n", encoding="utf-8")
    heading = f"{title}. {found.sentence[:1].upper()}{found.sentence[1:]}"
    draw_plots(folder / PICTURE, heading, pictured(found, curves))
    print_line(f"diminishing returns: {found.sentence} ({folder / PICTURE})")
    return True


def repeat_conclusion(folder: Path) -> None:
    """Print the conclusion that a run left in diminishing.json, if it left one.

    Raises CheckpointError where the file is damaged.
    """
    if (file := folder / NUMBERS).is_file():
        with damage_named(file):
            sentence = json.loads(read_text(file))["sentence"]
        print_line(f"diminishing returns: {sentence} ({folder / PICTURE})")


def again(folder: Path) -> None:
    """Do the same for a finished run. Raises CheckpointError where it has too few iterations."""
    allowed = "allowed: a run of stage=ppo, as outputs/<run>/<model>/ppo"
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist{nearest_path(str(folder))}; {allowed}")
    if not print_diminishing(folder, "/".join(folder.resolve().parts[-4:])):
        count = len(read_metrics(folder).get(REWARD, ((), ()))[0])
        raise CheckpointError(
            f"{folder / METRICS} has {counted(count, 'iteration')} of stage=ppo; {allowed}, with "
            f"{FEWEST_POINTS} or more"
        )
