"""The point of diminishing returns of a PPO run: knees, over-optimisation, and one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lightning_rlhf.report.gold_stop import GoldStop
from lightning_rlhf.report.knee import FEWEST_POINTS, LEVEL, Fit, Place, fit, smooth
from lightning_rlhf.report.shapes import AHEAD, GAIN

REWARD, KL, GOLD = "reward_mean", "kl_divergence", "eval/judge/gold"
FLOPS, ITERATIONS = "compute/flops", "iterations"
"""Units of compute: a cumulative metric, or iterations where it was not measured."""
NAMES = {REWARD: "reward", GOLD: "gold score"}

Curve = tuple[list[int], list[float]]
"""Steps and values of a metric."""
Points = tuple[Int[ndarray, " N"], Float[ndarray, " N"]]
"""Number of iterations that the policy had at each measurement, and the measured values."""


@dataclass(frozen=True)
class Point:
    """Iteration after which something holds, with its 90% interval; None is beyond the run."""

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
        """Return the point of diminishing returns; None without a fit."""
        return None if self.fit is None else self._point(self.fit.knee)

    @property
    def peak(self) -> Point | None:
        """Return the maximum of a curve that falls after it, beyond its noise; else None."""
        if self.fit is None or self.fit.peak.interval[1] == np.inf:
            return None
        return self._point(self.fit.peak)

    @property
    def stop(self) -> Point | None:
        """Return the maximum of a curve that falls, else the point of diminishing returns."""
        return self.peak or self.knee

    def at(self, share: float) -> float | None:
        """Return the x at a share of its range; None beyond the run."""
        return float(self.x[0] + share * (self.x[-1] - self.x[0])) if share <= 1 else None

    def change(self, since: int) -> float:
        """Return the fitted value at the end less the one after `since` iterations."""
        assert self.fit is not None
        x = np.interp(since, self.after, self.x)
        before = self.fit.value(float((x - self.x[0]) / (self.x[-1] - self.x[0])))
        return float(self.fit.curve[-1] - before)

    def as_json(self) -> dict[str, Any]:
        """Return knee and peak as iterations, and as x in its unit."""
        found: dict[str, Any] = {"metric": self.metric, "unit": self.unit, "points": len(self.y)}
        for name in ("knee", "peak"):
            point = getattr(self, name)
            found[name] = None if point is None or self.fit is None else asdict(point) | {
                "at": self.at(getattr(self.fit, name).at),
                "at_interval": [self.at(end) for end in getattr(self.fit, name).interval],
            }  # fmt: skip
        return found

    def _point(self, place: Place) -> Point:
        """Return a place as measured iterations; the interval is rounded outwards."""

        def iteration(share: float) -> int | None:
            x = self.at(share)
            if x is None:
                return None
            return int(self.after[min(int(np.searchsorted(self.x, x)), len(self.x) - 1)])

        low, high = place.interval
        before = int(np.searchsorted(self.x, self.at(low) or 0.0, side="right")) - 1
        return Point(iteration(place.at), (int(self.after[max(before, 0)]), iteration(high)))


@dataclass(frozen=True)
class Diminishing:
    """The gain from further compute in a run of PPO."""

    reward: Frontier
    by_kl: Frontier | None
    """Reward against KL; None where the KL did not grow."""
    gold: Frontier | None
    """Gold score against compute; None without a judge."""
    gold_stop: GoldStop | None
    """Stop by paired evaluations; None where the responses of fewer than two are known."""

    @property
    def decisive(self) -> Frontier:
        """Return the curve that names the stop: gold, where its gain can be measured."""
        return self.gold if self.gold is not None and self.gold.fit is not None else self.reward

    @property
    def stop(self) -> Point | None:
        """Return where to stop; None if the run had no gain.

        It is that of the paired evaluations, with the evaluations that are as good as the best one
        as its interval. Without any, it is the maximum of the decisive curve if it falls, its knee
        otherwise, and the end of the run if it has neither.
        """
        if (paired := self.gold_stop) is not None:
            return Point(
                paired.step, (paired.first, None if paired.last == paired.end else paired.last)
            )
        if (found := self.decisive.stop) is None:
            return None
        last = int(self.reward.after[-1]) + 1
        return Point(last if found.iteration is None else found.iteration, found.interval)

    @property
    def divergence(self) -> Point | None:
        """Return the iteration from which reward rises while gold does not; None if there is none.

        It is the stop of the paired evaluations, if the reward rises after it beyond the noise.
        Without any, it is where gold stops (its maximum if it falls, else its knee), if the fitted
        reward rises after it by at least GAIN of its own gain.
        """
        if self.gold_stop is not None:
            return self.stop if self.gold_stop.diverges else None
        if self.gold is None or self.reward.fit is None or (point := self.gold.stop) is None:
            return None
        least = GAIN * float(self.reward.fit.curve.max() - self.reward.fit.curve[0])
        rises = point.iteration is not None and self.reward.change(point.iteration) >= least
        return point if rises else None

    @property
    def sentence(self) -> str:
        """Return the conclusion as one line."""
        curve, count = self.decisive, len(self.reward.y)
        if count < FEWEST_POINTS:
            return (
                f"nothing to say about diminishing returns: {count} of {FEWEST_POINTS} iterations"
            )
        paired = [] if self.gold_stop is None else [str(self.gold_stop)]
        if curve.knee is None:
            none = "no gain within this run: the reward did not rise beyond its noise"
            return "; ".join([none, *paired])
        name = NAMES[curve.metric]
        if curve.knee.iteration is None:
            parts = [
                f"no knee within this run: to its end a further {AHEAD:.0%} of compute bought at "
                f"least {GAIN:.0%} of the gain in {name} (a knee before iteration "
                f"{curve.knee.interval[0]} is unlikely)"
            ]
        else:
            parts = [
                f"after iteration {curve.knee} a further {AHEAD:.0%} of compute bought less than "
                f"{GAIN:.0%} of the gain in {name}"
            ]
        if curve.peak is not None and curve.peak.iteration is not None:
            fall = -curve.change(curve.peak.iteration)
            parts.append(f"the {name} was highest after {curve.peak} and then fell by {fall:.2g}")
        parts += paired
        if (point := self.divergence) is not None and point.iteration is not None:
            paired_rise = None if self.gold_stop is None else self.gold_stop.reward_rise
            rise = paired_rise or self.reward.change(point.iteration)
            parts.append(
                f"from {point} on the reward rose by {rise:.2g} and the gold score did not"
            )
        return "; ".join(parts)

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
    that of the policy after t. Values that are not finite are left out; of a step that is there
    twice the later one counts.
    """
    reward, kl, gold = points(curves, REWARD, 1), points(curves, KL, 1), points(curves, GOLD, 0)
    steps, flops = points(curves, FLOPS, 0)
    # Compute that was not measured from the first iteration on is no measure of the run.
    is_measured = len(steps) > 0 and set(reward[0]) - {0} <= set(steps)

    def against_compute(metric: str, measured: Points) -> Frontier:
        after, y = measured
        x = after.astype(float)
        if is_measured:
            x = np.interp(after, [0, *steps], np.maximum.accumulate([0.0, *flops]))
        return Frontier(metric, FLOPS if is_measured else ITERATIONS, after, x, y, fit(x, y))

    return Diminishing(
        against_compute(REWARD, reward),
        against_kl(reward, kl),
        against_compute(GOLD, gold) if len(gold[0]) else None,
        gold_stop,
    )


def against_kl(reward: Points, kl: Points) -> Frontier | None:
    """Return reward against KL; None where the KL did not grow.

    The KL is smoothed by its own fit and made to rise, so that noise in it does not flatten the
    curve: x_t = max(0, max over s <= t of fit(s)). The ends of the intervals are moved outwards by
    the standard error of x there.
    """
    after, in_reward, in_kl = np.intersect1d(reward[0], kl[0], return_indices=True)
    iterations = after.astype(float)
    smoothed = smooth(iterations, kl[1][in_kl])
    if smoothed is None:
        return None
    shares = (iterations - iterations[0]) / (iterations[-1] - iterations[0])
    x, errors = (np.interp(shares, smoothed.u, f) for f in (smoothed.curve, smoothed.errors))
    y = reward[1][in_reward]
    found = fit(x, y)
    return Frontier(REWARD, KL, after, x, y, None if found is None else found.blurred(x, errors))


def points(curves: Mapping[str, Curve], metric: str, ahead: int) -> Points:
    """Return the finite values of a metric and, at each, its step less `ahead`."""
    steps, values = curves.get(metric, ([], []))
    latest = dict(zip(steps, values, strict=True))
    kept = sorted(step for step, value in latest.items() if np.isfinite(value))
    after = np.array(kept, dtype=int) - ahead
    return after, np.array([latest[step] for step in kept], dtype=float)
