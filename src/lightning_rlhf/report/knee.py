"""The knee and the peak of a noisy curve, each with an interval by bootstrap."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lightning_rlhf.report.estimates import Interval
from lightning_rlhf.report.resampling import resampled
from lightning_rlhf.report.shapes import AHEAD, Basis, knees_and_peaks

LEVEL = 0.9
"""Share of runs in which an interval is to hold the truth."""
FEWEST_POINTS = 12
"""Minimum number of points; with fewer, the noise cannot be told from the curve."""

_MOST_POINTS = 300
"""Number of points above which neighbours are averaged."""
_FREE = 4
"""Number of fitted parameters: level, height, time scale and slope."""
_BINS = 100
"""Number of steps of the whole range to which the ends of an interval are rounded; each is moved
one step outwards, because true curves are not on the list of shapes. The number was chosen on
synthetic curves, so that 90% of the intervals hold the truth, and tested on others."""
_LAST_KNEE = 1 - AHEAD
"""Share of the range behind which there is no knee, as no tenth of the range follows it."""
_LAST_PEAK = 0.98
"""Share of the range behind which a maximum counts as the end."""
_FALSE_GAINS = 0.05
"""Share of runs without a gain in which one is found."""


@dataclass(frozen=True)
class Place:
    """Point of a curve as a share of the range of x, 0 to 1; inf is beyond its end."""

    at: float
    interval: Interval
    """90% interval; its upper end is inf where a point beyond the run is inside."""


@dataclass(frozen=True)
class Fit:
    """Shape that fits a curve best, and what follows from it."""

    u: Float[ndarray, " N"]
    """Positions of the points, as shares of the range of x."""
    curve: Float[ndarray, " N"]
    """Fitted values at `u`."""
    knee: Place
    """Point of diminishing returns, as `shapes.knee_of` defines it."""
    peak: Place
    """Maximum; 1 where the curve rises to the end."""

    def value(self, u: Float[ndarray, " M"] | float) -> Float[ndarray, " M"]:
        """Return the fitted values at other positions."""
        return np.interp(u, self.u, self.curve)

    def blurred(self, x: Float[ndarray, " M"], errors: Float[ndarray, " M"]) -> Fit:
        """Return the fit with each interval widened by the standard errors of x at its ends.

        x: values that do not decrease, of which u are shares of the range.
        """
        blur = errors / (x[-1] - x[0])
        u = (x - x[0]) / (x[-1] - x[0])

        def widened(place: Place, end: float) -> Place:
            low, high = place.interval
            low, high = low - np.interp(low, u, blur), high + np.interp(high, u, blur)
            return replace(place, interval=(max(float(low), 0.0), np.inf if high > end else high))

        return replace(
            self, knee=widened(self.knee, _LAST_KNEE), peak=widened(self.peak, _LAST_PEAK)
        )


@dataclass(frozen=True)
class Smooth:
    """Shape that fits a curve best, and its standard error."""

    u: Float[ndarray, " N"]
    """Positions of the points, as shares of the range of x."""
    curve: Float[ndarray, " N"]
    """Fitted values at `u`, made to rise: the largest one so far, 0 at least."""
    errors: Float[ndarray, " N"]
    """Standard errors of `curve`."""


def smooth(x: Float[ndarray, " N"], y: Float[ndarray, " N"], seed: int = 0) -> Smooth | None:
    """Return the best fit of a shape to y against x as a curve that rises; None without a gain.

    The shape is that of `fit`. Its standard errors are the standard deviations of the fits to the
    fitted shape with resampled noise.
    """
    x, y = (_thinned(np.asarray(values, dtype=float)) for values in (x, y))
    if (u := _positions(x, y)) is None:
        return None
    generator = np.random.default_rng(seed)
    basis = Basis.of(u)
    centred = y - y.mean()
    if not _gains(u, centred, basis, generator):
        return None
    curve, noise = _fitted(centred, basis, generator)
    resamples = curve + noise
    means = resamples.mean(axis=1, keepdims=True)
    explained = _explained(resamples - means, basis)
    refits = basis[explained.argmax(axis=0)] * np.sqrt(explained.max(axis=0))[:, None] + means

    def rising(values: Float[ndarray, "... N"]) -> Float[ndarray, "... N"]:
        return np.maximum.accumulate((values + y.mean()).clip(min=0.0), axis=-1)

    return Smooth(u, rising(curve), rising(refits).std(axis=0))


def fit(x: Float[ndarray, " N"], y: Float[ndarray, " N"], seed: int = 0) -> Fit | None:
    """Return the best fit of a shape to y against x, which does not decrease; None without a gain.

        y_i = a + b s(u_i) + e_i, b > 0, u_i = (x_i - x_1) / (x_N - x_1), e_i = r e_{i-1} + n_i

    Least squares choose the shape s. With E(k) the sum of squares that the best shape with knee k
    explains and S the remaining one, the interval is {k : (max E - E(k)) / S <= q}, where q is the
    LEVEL quantile of the same ratio, for the fitted knee, over curves made of the fit and resampled
    noise: innovations n are drawn with replacement, so that neighbouring iterations stay
    correlated. The same holds for the peak. There is a gain where the shape explains more of y than
    in 95% of such curves made of a line that does not rise.

    Source: Bühlmann 1997, Sieve bootstrap for time series, Bernoulli 3(2); Davison and Hinkley
    1997, Bootstrap Methods and their Application, section 5.6, on test inversion
    """
    x, y = (_thinned(np.asarray(values, dtype=float)) for values in (x, y))
    if (u := _positions(x, y)) is None:
        return None
    generator = np.random.default_rng(seed)
    basis = Basis.of(u)
    knees, peaks = knees_and_peaks()
    centred = y - y.mean()
    height = basis.heights(centred[None])[:, 0]
    best = int(np.argmax(height))
    if not _gains(u, centred, basis, generator):
        return None
    curve, noise = _fitted(centred, basis, generator)
    resamples = curve + noise - noise.mean(axis=1, keepdims=True)
    total = (resamples**2).sum(axis=1)
    of_knee, of_peak = _bins(knees, _LAST_KNEE), _bins(peaks, _LAST_PEAK)
    # Of the shapes that share both bins the best one counts.
    pairs, profile = _maxima(of_knee * (_BINS + 1) + of_peak, height[:, None] ** 2)
    _, profiles = _maxima(of_knee * (_BINS + 1) + of_peak, _explained(resamples, basis))

    def place(at: float, of_pairs: Int[ndarray, " P"], of_best: int, end: float) -> Place:
        bins, explained = _maxima(of_pairs, profiles)
        own, tops = explained[np.searchsorted(bins, of_best)], explained.max(axis=0)
        bound = np.quantile((tops - own) / np.maximum(total - tops, 1e-6 * total), LEVEL)
        power = centred @ centred
        left = max(power - profile.max(), 1e-6 * power)
        inside = bins[(profile.max() - _maxima(of_pairs, profile)[1][:, 0]) / left <= bound]
        last = round(end * _BINS)
        low, high = max(inside.min() - 1, 0), min(inside.max() + 2, last)
        is_open = inside.max() == last
        return Place(at, (low / _BINS, np.inf if is_open else high / _BINS))

    return Fit(
        u,
        y.mean() + curve,
        place(float(knees[best]), pairs // (_BINS + 1), of_knee[best], _LAST_KNEE),
        place(float(peaks[best]), pairs % (_BINS + 1), of_peak[best], _LAST_PEAK),
    )


def _bins(values: Float[ndarray, " S"], end: float) -> Int[ndarray, " S"]:
    """Return the steps of the range in which knees or peaks lie; the last one is beyond `end`."""
    last = round(end * _BINS)
    return np.where(values > end, last, np.minimum(values * _BINS, last - 1)).astype(int)


def _maxima(
    of: Int[ndarray, " S"], values: Float[ndarray, "S R"]
) -> tuple[Int[ndarray, " G"], Float[ndarray, "G R"]]:
    """Return the different groups of rows, in order, and the largest values of each."""
    order = np.argsort(of, kind="stable")
    groups, starts = np.unique(of[order], return_index=True)
    return groups, np.maximum.reduceat(values[order], starts, axis=0)


def _positions(x: Float[ndarray, " N"], y: Float[ndarray, " N"]) -> Float[ndarray, " N"] | None:
    """Return the points as shares of the range of x; None where there is nothing to fit."""
    if len(y) < FEWEST_POINTS or not x[-1] > x[0] or np.ptp(y) == 0:
        return None
    return (x - x[0]) / (x[-1] - x[0])


def _fitted(
    y: Float[ndarray, " N"], basis: Basis, generator: np.random.Generator
) -> tuple[Float[ndarray, " N"], Float[ndarray, "R N"]]:
    """Return the best fit to y, of mean 0, and resamples of what is left of y."""
    height = basis.heights(y[None])[:, 0]
    best = int(np.argmax(height))
    curve = basis[best] * height[best]
    return curve, resampled((y - curve) * np.sqrt(len(y) / (len(y) - _FREE)), generator)


def _gains(
    u: Float[ndarray, " N"],
    y: Float[ndarray, " N"],
    basis: Basis,
    generator: np.random.Generator,
) -> bool:
    """Return whether y, of mean 0, rises beyond what its noise explains."""
    line = u - u.mean()
    null = min(float(line @ y / (line @ line)), 0.0) * line

    def share(values: Float[ndarray, "R N"]) -> Float[ndarray, " R"]:
        return _explained(values, basis).max(axis=0) / np.maximum((values**2).sum(axis=1), 1e-300)

    noise = resampled(y - null, generator)
    noise -= noise.mean(axis=1, keepdims=True)
    return bool(share(y[None])[0] > np.quantile(share(null + noise), 1 - _FALSE_GAINS))


def _explained(values: Float[ndarray, "R N"], basis: Basis) -> Float[ndarray, "S R"]:
    """Return the sum of squares that each shape explains of each curve, in single precision."""
    height = basis.heights(values.astype(np.float32))
    return np.square(height, out=height)


def _thinned(values: Float[ndarray, " N"]) -> Float[ndarray, " M"]:
    """Return at most _MOST_POINTS means of neighbours; the last may be of fewer."""
    size = -(-len(values) // _MOST_POINTS)
    if size <= 1:
        return values
    starts = np.arange(0, len(values), size)
    return np.add.reduceat(values, starts) / np.diff([*starts, len(values)])
