"""Shapes that a curve of reward against compute can have, each with its knee and its peak."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

AHEAD = 0.1
"""Share of the run's compute that is bought further."""
GAIN = 0.01
"""Share of the run's gain below which a further AHEAD of the compute is not worth it."""

_STEPS = 400
"""Number of steps of the grid on which knees and peaks are found."""
_SCALES = np.geomspace(0.003, 1.5, 64)[:, None]
"""Shares of the compute over which a curve saturates."""
_BREAKS = np.arange(0.02, 1.0, 0.0125)[:, None]
"""Shares of the compute at which a straight rise ends."""
_SLOPES = np.array(
    [
        *(-2.5, -2.0, -1.5, -1.2, -1.0, -0.8, -0.65, -0.5, -0.4, -0.3, -0.2, -0.13, -0.06),
        *(0.0, 0.05, 0.1, 0.2, 0.4, 0.8),
    ]
)[:, None]
"""Slopes of the straight line that is added, in units of the saturating rise."""
_SMALLEST_RISE = 0.1
"""Smallest rise from the start to the peak, as a share of a shape's range: falls are left out."""


def shapes(u: Float[ndarray, " N"]) -> Float[ndarray, "S N"]:
    """Return all shapes at the shares `u` of the compute, 0 to 1.

        s(u) = r(u) / r(1) + m u
        r(u) = 1 - exp(-(u / t)^k), k in {1/2, 1, 2}
            or 1 - (1 + u / t)^-k, k in {1, 2}
            or min(u / t, 1)

    With m = 0 a shape saturates, with m > 0 it rises to the end, and with m < 0 it rises and falls,
    as gold does under over-optimisation, of which R = d (a - b d) with d = sqrt(KL) is one case.

    Source: Gao, Schulman and Hilton 2023, Scaling laws for reward model overoptimization, eq. 1,
    https://arxiv.org/abs/2210.10760
    """
    return _all_shapes(u)[_known()[0]]


def knees_and_peaks() -> tuple[Float[ndarray, " S"], Float[ndarray, " S"]]:
    """Return each shape's knee and peak, as shares of the compute; inf for a shape without a knee.

    The order is that of `shapes`.
    """
    _, knees, peaks = _known()
    return knees, peaks


def knee_of(curves: Float[ndarray, "S G"]) -> Float[ndarray, " S"]:
    """Return the point of diminishing returns of curves on an even grid from 0 to 1.

        knee = min {c : max of f over [c', c' + AHEAD] - f(c') < GAIN (max f - f(0))
                        for all c' with c <= c' <= 1 - AHEAD}

    It is inf where the last AHEAD of the compute still buys that much.
    """
    steps = curves.shape[1] - 1
    reach = round(AHEAD * steps)
    window = np.lib.stride_tricks.sliding_window_view(curves, reach + 1, axis=1)
    bought = window.max(axis=2) - curves[:, : window.shape[1]]
    pays = bought >= GAIN * (curves.max(axis=1) - curves[:, 0])[:, None]
    first = np.where(pays.any(axis=1), window.shape[1] - np.argmax(pays[:, ::-1], axis=1), 0)
    return np.where(first < window.shape[1], first / steps, np.inf)


@lru_cache(maxsize=1)
def _known() -> tuple[Bool[ndarray, " A"], Float[ndarray, " S"], Float[ndarray, " S"]]:
    """Return which of all shapes rise, and the knees and peaks of those."""
    curves = _all_shapes(np.linspace(0.0, 1.0, _STEPS + 1))
    spans = np.ptp(curves, axis=1)
    rise = (spans > 1e-6) & (curves.max(axis=1) - curves[:, 0] > _SMALLEST_RISE * spans)
    return rise, knee_of(curves[rise]), np.argmax(curves[rise], axis=1) / _STEPS


@dataclass(frozen=True)
class Basis:
    """All shapes at the same points, with mean 0 and norm 1, each a sum of a rise and a line."""

    rises: Float[ndarray, "B N"]
    line: Float[ndarray, " N"]
    scales: Float[ndarray, "M B"]
    """One over the norm of each sum, for each slope; 0 for one that is constant at the points."""

    @classmethod
    def of(cls, u: Float[ndarray, " N"]) -> Basis:
        """Return the shapes at the shares `u` of the compute, in the order of `shapes`."""
        line, rises = u - u.mean(), _rises(u)
        rises -= rises.mean(axis=1, keepdims=True)
        across = 2 * (rises @ line) + _SLOPES * (line @ line)
        norms = np.sqrt(np.maximum((rises**2).sum(axis=1) + _SLOPES * across, 0.0))
        return cls(rises, line, np.where(norms > 1e-6, 1 / np.maximum(norms, 1e-6), 0.0))

    def heights(self, values: Float[ndarray, "R N"]) -> Float[ndarray, "S R"]:
        """Return the inner product of each shape with each curve, 0 where it is negative."""
        of_rises, of_line = self.rises.astype(values.dtype) @ values.T, values @ self.line
        found = np.empty((*self.scales.shape, len(values)), values.dtype)
        for slope, scales, out in zip(_SLOPES, self.scales, found, strict=True):
            np.multiply(of_rises + (slope * of_line).astype(values.dtype),
                        scales[:, None].astype(values.dtype), out=out)  # fmt: skip
        found = found.reshape(-1, len(values))[_known()[0]]
        return np.maximum(found, 0.0, out=found)

    def __getitem__(self, shape: Int[ndarray, " K"] | int) -> Float[ndarray, "*K N"]:
        """Return shapes by their number."""
        slope, rise = np.divmod(np.flatnonzero(_known()[0])[shape], len(self.rises))
        sums = self.rises[rise] + _SLOPES[slope] * self.line
        return sums * self.scales[slope, rise][..., None]


def _all_shapes(u: Float[ndarray, " N"]) -> Float[ndarray, "A N"]:
    return (_rises(u) + _SLOPES[:, None] * u).reshape(-1, len(u))


def _rises(u: Float[ndarray, " N"]) -> Float[ndarray, "B N"]:
    """Return r(u) / r(1), and 0, of which a slope makes a straight line."""

    def rises(x: Float[ndarray, " N"]) -> Float[ndarray, "B N"]:
        return np.concatenate(
            [
                *(1 - np.exp(-((x / _SCALES) ** power)) for power in (0.5, 1.0, 2.0)),
                *(1 - (1 + x / _SCALES) ** -power for power in (1.0, 2.0)),
                np.minimum(x / _BREAKS, 1.0),
            ]
        )

    return np.concatenate([rises(u) / rises(np.ones(1)), np.zeros((1, len(u)))])
