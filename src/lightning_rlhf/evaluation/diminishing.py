"""The point of diminishing returns of a PPO run: a saturating fit, a stop, and one sentence.

diminishing.json and diminishing.png in the run's folder, and a line on the console. The stop of a
run with a judge is that of its gold scores.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression
from scipy.signal import lfilter

from lightning_rlhf.callbacks.files import SAMPLES
from lightning_rlhf.core.errors import CheckpointError, counted
from lightning_rlhf.core.metrics import FLOPS, GOLD, HELD_OUT, KL, REWARD
from lightning_rlhf.io import console, storage, user_code
from lightning_rlhf.report import estimates, figures
from lightning_rlhf.report.curves import PALETTE, PURPLE, Curves, Series, frontier_plots
from lightning_rlhf.runs import folders, measured

NUMBERS, PICTURE = "diminishing.json", "diminishing.png"
ITERATIONS = "iterations"
"""Unit of compute where FLOPS, a cumulative metric, was not measured."""
NAMES = {REWARD: "reward", GOLD: "gold score"}
AHEAD, GAIN = 0.1, 0.01
"""Share of the run's compute that is bought further, and of its gain below which that is not worth
it."""
LEVEL = 0.9
"""Share of runs in which an interval is to hold the truth."""
FEWEST_POINTS = 12
"""Minimum number of points; with fewer, the noise cannot be separated from the curve."""
SEED, _RESAMPLES = 0, 200
_SCALES = np.exp(np.linspace(-5.0, 2.3, 2921))
"""Scales of the curves that are fitted, as shares of the range of x, 0.25% apart."""
_FALSE_GAINS = 0.05
"""Share of runs without a gain in which one is found, at most."""


@dataclass(frozen=True)
class Point:
    """Iteration after which something holds, with its interval; None is beyond the run."""

    iteration: int | None
    interval: tuple[int, int | None]

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.iteration} [{low}-{'end' if high is None else high}]"


@dataclass(frozen=True)
class Fit:
    """Saturating curve that fits best, over x as a share of its range, 0 to 1."""

    curve: tuple[float, float, float]
    """Start, gain and scale of `saturating`."""
    knee: float
    """Share from which a further AHEAD adds less than GAIN of the gain; inf is beyond the run."""
    interval: estimates.Interval
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

    def at(self, shares: ArrayLike) -> Float[ndarray, " S"]:
        """Return the x at shares of its range; inf beyond the run."""
        return self.x[0] + np.asarray(shares) * (self.x[-1] - self.x[0])

    @property
    def knee(self) -> Point | None:
        """Return the knee as measured iterations; None without a fit. Ends round outwards."""
        if self.fit is None:
            return None
        knee, low, high = self.at([self.fit.knee, *self.fit.interval])
        after = [*self.after.tolist(), None]  # the last one is beyond the run
        last, until = (after[place] for place in np.searchsorted(self.x, [knee, high]))
        start = int(np.searchsorted(self.x, low, side="right")) - 1
        return Point(last, (after[max(start, 0)], until))

    def as_json(self) -> dict[str, Any]:
        """Return the knee as iterations, and as x in its unit."""
        found = None
        if self.fit is not None and self.knee is not None:
            places = self.at([self.fit.knee, *self.fit.interval])
            at, *ends = (float(x) if np.isfinite(x) else None for x in places)
            found = {**asdict(self.knee), "at": at, "at_interval": ends}
        return {"metric": self.metric, "unit": self.unit, "points": len(self.y), "knee": found}


@dataclass(frozen=True, kw_only=True)
class GoldStop:
    """Earliest evaluation whose gold score is as good as that of the best one and of the end."""

    stop: Point
    """Iteration of the evaluation at which to stop; 0 is the SFT model. The interval holds the
    evaluations whose gold score is not below the best one's beyond the noise."""
    best: int
    evaluations: int
    prompts: int
    gold: float
    """Mean gold score over prompts at `stop`."""
    gold_at_best: float
    gold_at_end: float
    reward_rise: float
    """Reward at the end less the one at `stop`, mean over the same prompts."""
    reward_interval: estimates.Interval
    """95% interval of `reward_rise`."""

    @property
    def diverges(self) -> bool:
        """Return whether the reward rose after the stop, beyond the noise; gold did not."""
        return self.reward_interval[0] > 0

    def __str__(self) -> str:
        measured = f"in {self.evaluations} evaluations on {counted(self.prompts, 'prompt')}"
        if self.gold == self.gold_at_end:
            words = f"the gold score gained to the end, iteration {self.stop}: it is "
            return f"{words}{self.gold:z.3g} there, {measured}"
        words = (
            f"after iteration {self.stop} the gold score gained nothing beyond the noise: it is "
            f"{self.gold:z.3g} there, {self.gold_at_best:z.3g} at best, at {self.best}, and "
            f"{self.gold_at_end:z.3g} at the end, {measured}"
        )
        rise = f"from {self.stop} on the reward rose by {self.reward_rise:.2g}"
        return f"{words}; {rise} and the gold score did not" if self.diverges else words


class Frontiers(NamedTuple):
    """Curves of a run of PPO."""

    reward: Frontier
    by_kl: Frontier | None
    """Reward against KL; None where the KL was not measured."""
    gold: Frontier | None
    """Gold score against compute; None without a judge."""


def measure_returns(curves: Curves) -> Frontiers:
    """Return the curves of reward, KL and gold score from the metrics of a run.

    Reward and KL of iteration t are those of the policy after t - 1 iterations, gold of step t is
    that of the policy after t. The KL on the axis is the curve closest to the measured one that
    never falls, so that noise in it does not flatten the reward. Values that are not finite are
    left out; of a step that is there twice the later one counts.
    """
    (reward, rewards), (kl, kls) = _points(curves, REWARD, 1), _points(curves, KL, 1)
    (gold, golds), (steps, flops) = _points(curves, GOLD, 0), _points(curves, FLOPS, 0)
    # Compute that was not measured from the first iteration on is no measure of the run.
    is_measured = len(steps) > 0 and set(reward) - {0} <= set(steps)

    def against_compute(metric: str, after: ndarray, y: ndarray) -> Frontier:
        x = after.astype(float)
        if is_measured:
            x = np.interp(after, [0, *steps], np.maximum.accumulate([0.0, *flops]))
        return Frontier(metric, FLOPS if is_measured else ITERATIONS, after, x, y, fit(x, y))

    both, in_reward, in_kl = np.intersect1d(reward, kl, return_indices=True)
    x, y = kls[in_kl], rewards[in_reward]
    x = isotonic_regression(x).x if len(x) else x
    return Frontiers(
        reward=against_compute(REWARD, reward, rewards),
        by_kl=Frontier(REWARD, KL, both, x, y, fit(x, y)) if len(x) else None,
        gold=against_compute(GOLD, gold, golds) if len(gold) else None,
    )


def conclude(found: Frontiers, gold_stop: GoldStop | None = None) -> dict[str, Any]:
    """Return the content of diminishing.json; an iteration or position of None is beyond the run.

    The knee is that of the gold score, where its gain can be measured, else that of the reward. The
    stop is that by gold, else the knee, else the end of the run, and None without a gain.
    """
    decisive = found.gold if found.gold is not None and found.gold.fit is not None else found.reward
    knee, more = decisive.knee, f"a further {AHEAD:.0%} of compute bought"
    bought = f"{GAIN:.0%} of the gain in {NAMES[decisive.metric]}"
    if knee is None:
        words = "no gain within this run: the reward did not rise beyond its noise"
    elif knee.iteration is None:
        words = f"no knee within this run: to its end {more} at least {bought} (a knee before "
        words += f"iteration {knee.interval[0]} is unlikely)"
    else:
        words = f"after iteration {knee} {more} less than {bought}"
    metric, stop = decisive.metric, None if knee is None else asdict(knee)
    if gold_stop is not None:
        words, metric, stop = f"{words}; {gold_stop}", GOLD, asdict(gold_stop.stop)
    if stop is not None and stop["iteration"] is None:
        stop["iteration"] = int(found.reward.after[-1]) + 1
    return {
        "sentence": words,
        "unit_of_compute": found.reward.unit,
        "share_of_compute": AHEAD,
        "share_of_gain": GAIN,
        "level": LEVEL,
        "stop": None if stop is None else {"metric": metric, **stop},
        "gold_stop": None if gold_stop is None else asdict(gold_stop),
        "divergence": stop if gold_stop is not None and gold_stop.diverges else None,
        "curves": [curve.as_json() for curve in found if curve is not None],
    }


def saturating(
    u: Float[ndarray, "*N"], start: float, gain: float, scale: Float[ndarray, "*S"] | float
) -> Float[ndarray, "*N"]:
    """Return a curve that rises by `gain` from 0 to 1 and ever more slowly.

    y(u) = start + gain (1 - exp(-u / scale)) / (1 - exp(-1 / scale))

    A large scale makes it a straight line.
    """
    return start + gain * np.expm1(-u / scale) / np.expm1(-1 / scale)


def knee_of(scale: float) -> float:
    """Return the share of the compute from which no further AHEAD adds GAIN of the gain.

        k = c log((1 - exp(-AHEAD / c)) / (GAIN (1 - exp(-1 / c)))), c = scale

    It is inf where less than AHEAD of the compute follows it.
    """
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
    explained, (best,) = _best_fits(u, y[None])
    of_noise, _ = _best_fits(u, _resampled(y - y.mean(), generator))
    if not (best[1] > 0 and explained[0] > np.quantile(of_noise, 1 - _FALSE_GAINS)):
        return None  # also where numbers overflow
    fitted = saturating(u, *best)
    residuals = (y - fitted) * np.sqrt(len(y) / (len(y) - len(best)))
    _, refits = _best_fits(u, fitted + _resampled(residuals, generator))
    knees = [knee_of(scale) for *_, scale in refits]
    low, high = np.quantile(knees, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2], method="nearest")
    return Fit(tuple(best.tolist()), knee_of(best[2]), (float(low), float(high)))


def _best_fits(
    u: Float[ndarray, " N"], y: Float[ndarray, "R N"]
) -> tuple[Float[ndarray, " R"], Float[ndarray, "R 3"]]:
    """Return the share of each row's variance that the best fit explains, and its parameters.

    For each of _SCALES start and gain are those of least squares.
    """
    curves = saturating(u, 0.0, 1.0, _SCALES[:, None])
    means = curves.mean(axis=1)
    curves -= means[:, None]
    power, rows = (curves**2).sum(axis=1), np.arange(len(y))
    products = (y - y.mean(axis=1, keepdims=True)) @ curves.T
    best = (products**2 / power).argmax(axis=1)
    gain = products[rows, best] / power[best]
    start = y.mean(axis=1) - gain * means[best]
    explained = gain * products[rows, best] / (len(u) * y.var(axis=1))
    return explained, np.stack([start, gain, _SCALES[best]], axis=1)


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


def _points(curves: Curves, metric: str, ahead: int) -> tuple[ndarray, ndarray]:
    """Return the finite values of a metric and, at each, its step less `ahead`."""
    latest = dict(zip(*curves.get(metric, ((), ())), strict=True))
    kept = sorted((step, value) for step, value in latest.items() if np.isfinite(value))
    after, values = np.array(kept, dtype=float).reshape(-1, 2).T
    return after.astype(int) - ahead, values


def find_gold_stop(
    gold: Mapping[int, Float[ndarray, " N"]], reward: Mapping[int, Float[ndarray, " N"]]
) -> GoldStop | None:
    """Return the earliest evaluation that is as good as the best and as the end.

        stop = min {t : high(g_t - g_b) >= 0 and mean(g_t) >= mean(g_T)}

    with g_t the gold scores of the prompts in evaluation t, b the evaluation with the highest mean,
    T the last one, and high the upper end of the 95% interval of the mean of paired differences, by
    bootstrap over prompts. That the best is partly so by luck makes the stop later, not earlier.

    gold, reward: iteration of an evaluation -> a score's mean over the responses to each prompt,
        of the same prompts; NaN for a prompt without a gold score, which is left out.
    Returns: None with fewer than two evaluations, or fewer than two prompts with gold in all.
    """
    steps = sorted(gold)
    scores = np.stack([gold[step] for step in steps]) if steps else np.zeros((0, 0))
    known = ~np.isnan(scores).any(axis=0)
    if len(steps) < 2 or known.sum() < 2:
        return None
    scores = scores[:, known]
    means = scores.mean(axis=1)
    best = int(np.argmax(means))
    _, high = estimates.mean_interval(scores - scores[best], SEED)
    within = np.flatnonzero(high >= 0)
    stop = int(within[means[within] >= means[-1]][0])
    rise = (reward[steps[-1]] - reward[steps[stop]])[known]
    last = None if within[-1] == len(steps) - 1 else steps[within[-1]]
    return GoldStop(
        stop=Point(steps[stop], (steps[within[0]], last)),
        best=steps[best],
        evaluations=len(steps),
        prompts=int(known.sum()),
        gold=float(means[stop]),
        gold_at_best=float(means[best]),
        gold_at_end=float(means[-1]),
        reward_rise=float(rise.mean()),
        reward_interval=estimates.single(estimates.mean_interval(rise, SEED)),
    )


def paired_stop(folder: Path) -> GoldStop | None:
    """Return where to stop by the gold scores of the evaluations; None where they are not known.

    Evaluations of other prompts than those of the last one are left out.

    Raises CheckpointError where a file of samples is damaged.
    """
    gold: dict[int, ndarray] = {}
    reward: dict[int, ndarray] = {}
    prompts: list[int] = []
    for path in sorted((folder / SAMPLES).glob("eval_*.jsonl"), reverse=True):
        samples = [sample for _, sample in storage.json_lines(path)]
        with measured.damage_named(path):
            found = [sample["index"] for sample in samples]
            prompts = prompts or found
            if found == prompts:
                step = int(path.stem.removeprefix("eval_"))
                gold[step] = measured.by_prompt(samples, GOLD)
                reward[step] = measured.by_prompt(samples, HELD_OUT)
    return find_gold_stop(gold, reward)


def write_diminishing(folder: Path, title: str) -> int:
    """Write diminishing.json and diminishing.png into a run's folder, and print the conclusion.

    Nothing is written or printed where a run has fewer than FEWEST_POINTS iterations.
    Raises CheckpointError where the folder or its metrics.csv is damaged.

    Returns the number of iterations.
    """
    curves = measured.read_metrics(folder)
    iterations = len(curves.get(REWARD, ((), ()))[0])
    if iterations < FEWEST_POINTS:
        return iterations
    found = measure_returns(curves)
    conclusion = conclude(found, paired_stop(folder))
    with storage.written_whole(folder / NUMBERS) as temporary:
        text = json.dumps(conclusion, indent=1, allow_nan=False)
        temporary.write_text(f"{text}\n", encoding="utf-8")
    *others, by_compute = frontier_plots(curves, conclusion)
    series = [*by_compute.series]
    for curve, color in ((found.reward, PURPLE), (found.gold, PALETTE[4])):
        if curve is not None and curve.fit is not None:
            u = np.linspace(0.0, 1.0, 400)
            line = list(zip(curve.at(u), saturating(u, *curve.fit.curve), strict=True))
            series.append(Series(label=f"fit of {NAMES[curve.metric]}", color=color, points=line))
    sentence = conclusion["sentence"]
    heading = f"{title}. {sentence[:1].upper()}{sentence[1:]}"
    figures.draw_plots(folder / PICTURE, heading, [*others, replace(by_compute, series=series)])
    return iterations


def measure_run(folder: Path) -> None:
    """Write the files for a finished run. Raises CheckpointError with too few iterations."""
    allowed = "allowed: a run of stage=ppo, as outputs/<run>/<model>/ppo"
    if not folder.is_dir():
        found = "is no folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {found}{user_code.nearest_path(str(folder))}; {allowed}")
    count = write_diminishing(folder, "/".join(folder.resolve().parts[-4:]))
    if count < FEWEST_POINTS:
        found = f"{folder / folders.METRICS} has {counted(count, 'iteration')} of stage=ppo"
        raise CheckpointError(f"{found}; {allowed}, with {FEWEST_POINTS} or more")
    sentence = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))["sentence"]
    console.print_line(f"diminishing returns: {sentence} ({folder / PICTURE})")
