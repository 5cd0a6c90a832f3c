"""Means with intervals, correlations that may be undefined, and bins of equal mass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.stats import rankdata

RESAMPLES = 2000
"""Number of resamples of a bootstrap; 50 of them lie beyond each end of a 95% interval."""
MOMENTS = ("mean", "std", "lowest", "median", "highest")
FAR_SPANS = 3
"""Distance from the middle values, in units of their span, beyond which a value is far outside; on
an axis that showed it the middle values would fill less than a quarter."""
FEWEST = 8
"""Minimum number of values for one of them to count as far outside."""

Values = Float[ndarray, " N"]
"""A number of each of N rows."""
Places = Int[ndarray, " N"]
"""The place of each row in something, as its group."""
Interval = tuple[float, float]
"""Low and high end of an interval."""
Ends = tuple[Float[ndarray, " *S"], Float[ndarray, " *S"]]
"""Low and high ends of intervals."""


@dataclass(frozen=True)
class Group:
    """Pairs with a property in common, and the accuracy of their ranking."""

    label: str
    pairs: int
    accuracy: float
    """Share of the pairs ranked right, a tie counting one half."""
    interval: Interval | None
    """95% interval of the accuracy; None if the pairs have fewer than two prompts."""


def resampled_means(
    values: Values, groups: Places, clusters: Places, seed: int
) -> Float[ndarray, "R G"]:
    """Return each group's mean in RESAMPLES samples of whole clusters [R,G]; NaN without rows.

    A resample draws as many clusters as there are, with replacement, and takes all rows of each:
    mean_g = sum over drawn clusters of its values in g / sum of its rows in g. Clusters whose sums
    are equal are drawn together, by a multinomial, which is the same distribution.

    Source: Field and Welsh 2007, Bootstrapping clustered data, J. R. Statist. Soc. B 69(3)
    """
    n_clusters, n_groups = int(clusters.max()) + 1, int(groups.max()) + 1
    sums, rows = np.zeros((2, n_clusters, n_groups))
    np.add.at(sums, (clusters, groups), values)
    np.add.at(rows, (clusters, groups), 1)
    kinds, copies = np.unique(np.hstack([sums, rows]), axis=0, return_counts=True)
    generator, shares = np.random.default_rng(seed), copies / n_clusters
    totals = np.stack([generator.multinomial(n_clusters, shares) @ kinds for _ in range(RESAMPLES)])
    with np.errstate(invalid="ignore"):
        return totals[:, :n_groups] / totals[:, n_groups:]


def interval95(resamples: Float[ndarray, " R"]) -> Interval:
    """Return the 2.5% and 97.5% quantiles of the resamples that are not NaN."""
    low, high = np.nanpercentile(resamples, [2.5, 97.5])
    return float(low), float(high)


def mean_interval(values: Float[ndarray, "*S N"], seed: int) -> Ends:
    """Return the ends of 95% intervals of means over N prompts, for each of S sets of values.

        mean - q(97.5%) * se  to  mean - q(2.5%) * se,    q: quantiles of (mean* - mean) / se*,

    with the standard errors se of the values and se* of a resample of whole prompts: the
    studentised bootstrap. The percentile bootstrap holds the mean of skewed values too seldom, for
    16 exponential ones 89% of the time. A resample of equal values takes the se of all values. All
    sets share the resamples. At least two prompts are needed.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 12.5
    """
    n = values.shape[-1]
    mean = values.mean(axis=-1, keepdims=True)
    off = values - mean
    scale = np.abs(off).max(axis=-1, keepdims=True)
    off = np.divide(off, scale, out=np.zeros_like(off), where=scale > 0)
    shares = resample_shares(n, seed)
    moved = off @ shares.T
    variance = np.maximum(off**2 @ shares.T - moved**2, 0) / (n - 1)
    own = np.sqrt((off**2).mean(axis=-1, keepdims=True) / (n - 1))
    error = np.where(variance > 1e-12, np.sqrt(variance), own)
    student = np.divide(moved, error, out=np.zeros_like(moved), where=error > 0)
    high, low = np.percentile(student, [2.5, 97.5], axis=-1)
    error_of_mean = own[..., 0] * scale[..., 0]
    return mean[..., 0] - error_of_mean * low, mean[..., 0] - error_of_mean * high


def rate_interval(rates: Float[ndarray, "*S N"], seed: int) -> Ends:
    """Return the ends of 95% intervals of mean rates over N prompts, for each of S sets of rates.

    They are percentiles of the bootstrap over the prompts and three more, of the rates 1, 1/2 and
    0, so that they stay between 0 and 1 and a win on every prompt is not taken for certain. All
    sets share the resamples.

    rates: 0 to 1 each, for example wins with a tie as one half.
    Source: Agresti and Coull 1998, The American Statistician 52(2), for added successes and
        failures
    Departs: they add two of each, which covers a rate that varies little with up to 98%.
    """
    more = np.broadcast_to([0.0, 0.5, 1.0], (*rates.shape[:-1], 3))
    known = np.concatenate([rates, more], axis=-1)
    means = known @ resample_shares(known.shape[-1], seed).T
    low, high = np.percentile(means, [2.5, 97.5], axis=-1).clip(0, 1)  # sums may round beyond
    return low, high


def single(ends: Ends) -> Interval:
    """Return the ends of the interval of a single set of values."""
    low, high = ends
    return float(low), float(high)


def number_text(value: float | None) -> str:
    """Return a number with three decimals; a dash for None."""
    return "-" if value is None else f"{value:z.3f}"


def interval_text(interval: Interval | None, digits: int = 3) -> str:
    """Return an interval for after a number, as " [LOW, HIGH]"; nothing for None."""
    return "" if interval is None else f" [{interval[0]:z.{digits}f}, {interval[1]:z.{digits}f}]"


def resample_shares(n: int, seed: int) -> Float[ndarray, "R N"]:
    """Return the share of each of n rows in each of RESAMPLES samples with replacement."""
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    return counts / n


def describe(values: Values, edges: Float[ndarray, " E"]) -> dict[str, Any]:
    """Return the moments and the histogram of at least one value.

    Returns: count, mean, std with denominator `count`, lowest, median, highest; histogram, the
        number of values in each bin, where the last edge is included; outer values are in no bin.
    """
    moments = (values.mean(), values.std(), values.min(), np.median(values), values.max())
    found = dict(zip(MOMENTS, map(float, moments), strict=True))
    return {"count": len(values), **found, "histogram": np.histogram(values, edges)[0].tolist()}


def group_accuracy(
    right: Values, groups: Places, labels: Sequence[str], clusters: Places, seed: int
) -> tuple[Group, ...]:
    """Return the accuracy and its interval for each group that has pairs; clusters are prompts."""
    means = resampled_means(right, groups, clusters, seed)
    found = []
    for index in np.unique(groups):
        inside = groups == index
        has_prompts = len(np.unique(clusters[inside])) > 1
        interval = interval95(means[:, index]) if has_prompts else None
        found.append(Group(labels[index], int(inside.sum()), float(right[inside].mean()), interval))
    return tuple(found)


def equal_mass(values: Values, bins: int) -> Places:
    """Return the bin of each value, 0 for the lowest, with about as many values in each bin.

        bin = floor(bins * |{smaller values}| / N), renumbered without gaps

    Equal values share a bin, so that the order of the rows does not matter; if there are at most
    `bins` different values, each has a bin of its own.
    """
    distinct, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    if len(distinct) <= bins:
        return inverse
    smaller = np.cumsum(counts) - counts
    _, bin_of = np.unique(bins * smaller // len(values), return_inverse=True)
    return bin_of[inverse]


def correlate(x: Values, y: Values) -> dict[str, Any]:
    """Return the number of `points`, the `pearson` correlation, and `spearman`, that of the ranks.

    Correlations are -1 to 1; None if x or y is constant or there are fewer than three points.
    """
    found: dict[str, Any] = {"points": len(x), "pearson": None, "spearman": None}
    if len(x) < 3 or not (np.ptp(x) > 0 and np.ptp(y) > 0):
        return found
    for name, pair in (("pearson", (x, y)), ("spearman", (rankdata(x), rankdata(y)))):
        a, b = (values - values.mean() for values in pair)
        a, b = a / np.abs(a).max(), b / np.abs(b).max()  # so that no square under- or overflows
        share = (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())
        found[name] = float(np.clip(share, -1.0, 1.0))
    return found


def inner_range(values: Values) -> Interval | None:
    """Return the lowest and the highest value that is not far outside; None if no value is.

    A value is far outside if it is more than FAR_SPANS spans away from the middle values, which are
    all but the lowest and the highest twentieth and whose range is the span. With fewer than FEWEST
    finite values, or if the middle values are all equal, no value is far outside.
    """
    finite = np.sort(values[np.isfinite(values)])
    trimmed = max(1, len(finite) // 20)
    if len(finite) < FEWEST:
        return None
    low, high = finite[trimmed], finite[-1 - trimmed]
    reach = FAR_SPANS * (high - low)
    inside = finite[(finite >= low - reach) & (finite <= high + reach)]
    if reach == 0 or len(inside) == len(finite):
        return None
    return float(inside[0]), float(inside[-1])
