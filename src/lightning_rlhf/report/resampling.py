"""Bootstrap of the noise of a curve, whose neighbours are correlated."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy import ndarray

RESAMPLES = 200
"""Number of resamples of the noise of a curve."""


def resampled(noise: Float[ndarray, " N"], generator: np.random.Generator) -> Float[ndarray, "R N"]:
    """Return resamples with the variance of the noise and its correlation r between neighbours.

    r is the sample's correlation plus (1 + 4 r) / N, which makes up for its bias.

    Source: Kendall 1954, Note on bias in the estimation of autocorrelation, Biometrika 41
    """
    n = len(noise)
    power = float(noise @ noise)
    if power == 0:
        return np.zeros((RESAMPLES, n))
    r = float(noise[1:] @ noise[:-1]) / power
    r = float(np.clip(r + (1 + 4 * r) / n, 0.0, 0.9))
    innovations = noise[1:] - r * noise[:-1]
    innovations -= innovations.mean()
    innovations *= np.sqrt(power / n * (1 - r * r) / np.mean(innovations**2))
    drawn = generator.choice(innovations, (n, RESAMPLES))
    state = drawn[0] / np.sqrt(1 - r * r)
    rows = [state]
    for row in drawn[1:]:
        state = r * state + row
        rows.append(state)
    return np.stack(rows, axis=1)
