"""The knee and the peak of a noisy curve, each with an interval by bootstrap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lightning_rlhf.report.estimates import Interval
from lightning_rlhf.report.shapes import AHEAD, knees_and_peaks, shapes

LEVEL = 0.9
"""Share of runs in which an interval is to hold the truth."""
FEWEST_POINTS = 12
"""Minimum number of points; with fewer, the noise cannot be told from the curve."""

_RESAMPLES = 200
_MOST_POINTS = 300
"""Number of points above which neighbours are averaged."""
_FREE = 4
"""Number of fitted parameters: level, height, time scale and slope."""
_BINS = 100
"""Number of steps of the whole range to which the ends of an interval are rounded; each is moved
one step outwards, because true curves are not on the list of shapes. The number was chosen on
synthetic curves, so that 90% of the intervals hold the truth, and tested on others."""
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
    if len(y) < FEWEST_POINTS or not x[-1] > x[0] or np.ptp(y) == 0:
        return None
    generator = np.random.default_rng(seed)
    u = (x - x[0]) / (x[-1] - x[0])
    basis = _normed(shapes(u))
    knees, peaks = knees_and_peaks()
    centred = y - y.mean()
    height = np.maximum(basis @ centred, 0.0)
    best = int(np.argmax(height))
    if not _gains(u, centred, basis, generator):
        return None
    curve = basis[best] * height[best]
    noise = _resampled((centred - curve) * np.sqrt(len(y) / (len(y) - _FREE)), generator)
    resamples = curve + noise - noise.mean(axis=1, keepdims=True)
    explained = _explained(resamples, basis)
    total = (resamples**2).sum(axis=1)

    def place(values: Float[ndarray, " S"], end: float) -> Place:
        last = round(end * _BINS)
        of = np.where(values > end, last, np.minimum(values * _BINS, last - 1)).astype(int)
        order = np.argsort(of, kind="stable")
        bins, starts = np.unique(of[order], return_index=True)
        profile = np.maximum.reduceat(height[order] ** 2, starts)
        profiles = np.maximum.reduceat(explained[:, order], starts, axis=1)
        own, tops = profiles[:, np.searchsorted(bins, of[best])], profiles.max(axis=1)
        bound = np.quantile((tops - own) / np.maximum(total - tops, 1e-6 * total), LEVEL)
        left = max(centred @ centred - profile.max(), 1e-6 * (centred @ centred))
        inside = bins[(profile.max() - profile) / left <= bound]
        low, high = max(inside.min() - 1, 0), min(inside.max() + 2, last)
        is_open = inside.max() == last
        return Place(float(values[best]), (low / _BINS, np.inf if is_open else high / _BINS))

    return Fit(u, y.mean() + curve, place(knees, 1 - AHEAD), place(peaks, _LAST_PEAK))


def _gains(
    u: Float[ndarray, " N"],
    y: Float[ndarray, " N"],
    basis: Float[ndarray, "S N"],
    generator: np.random.Generator,
) -> bool:
    """Return whether y, of mean 0, rises beyond what its noise explains."""
    line = u - u.mean()
    null = min(float(line @ y / (line @ line)), 0.0) * line

    def share(values: Float[ndarray, "R N"]) -> Float[ndarray, " R"]:
        return _explained(values, basis).max(axis=1) / np.maximum((values**2).sum(axis=1), 1e-300)

    noise = _resampled(y - null, generator)
    noise -= noise.mean(axis=1, keepdims=True)
    return bool(share(y[None])[0] > np.quantile(share(null + noise), 1 - _FALSE_GAINS))


def _explained(
    values: Float[ndarray, "R N"], basis: Float[ndarray, "S N"]
) -> Float[ndarray, "R S"]:
    """Return the sum of squares of each curve that each shape explains, in single precision."""
    return np.maximum(values.astype(np.float32) @ basis.astype(np.float32).T, 0.0) ** 2


def _resampled(
    noise: Float[ndarray, " N"], generator: np.random.Generator
) -> Float[ndarray, "R N"]:
    """Return resamples with the variance of the noise and its correlation r between neighbours.

    r is the sample's correlation plus (1 + 4 r) / N, which makes up for its bias.

    Source: Kendall 1954, Note on bias in the estimation of autocorrelation, Biometrika 41
    """
    n = len(noise)
    power = float(noise @ noise)
    if power == 0:
        return np.zeros((_RESAMPLES, n))
    r = float(noise[1:] @ noise[:-1]) / power
    r = float(np.clip(r + (1 + 4 * r) / n, 0.0, 0.9))
    innovations = noise[1:] - r * noise[:-1]
    innovations -= innovations.mean()
    innovations *= np.sqrt(power / n * (1 - r * r) / np.mean(innovations**2))
    drawn = generator.choice(innovations, (n, _RESAMPLES))
    state = drawn[0] / np.sqrt(1 - r * r)
    rows = [state]
    for row in drawn[1:]:
        state = r * state + row
        rows.append(state)
    return np.stack(rows, axis=1)


def _normed(basis: Float[ndarray, "S N"]) -> Float[ndarray, "S N"]:
    """Return the shapes with mean 0 and norm 1; 0 for one that is constant at these points."""
    basis = basis - basis.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(basis, axis=1, keepdims=True)
    return np.divide(basis, norms, out=np.zeros_like(basis), where=norms > 1e-9)


def _thinned(values: Float[ndarray, " N"]) -> Float[ndarray, " M"]:
    """Return at most _MOST_POINTS means of neighbours; the last may be of fewer."""
    size = -(-len(values) // _MOST_POINTS)
    if size <= 1:
        return values
    starts = np.arange(0, len(values), size)
    return np.add.reduceat(values, starts) / np.diff([*starts, len(values)])
