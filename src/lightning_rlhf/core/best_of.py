"""Best-of-n sampling: how far the best of n responses is from the policy they are drawn from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def best_of_kl_bound(n: int) -> float:
    """Return the largest KL of best-of-n to the policy that it samples from, nats.

        KL <= log n - (n - 1) / n, equal where no two responses have the same score

    Source: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, appendix G.3
    """
    return math.log(n) - (n - 1) / n


def best_of_kl(scores: Sequence[float], n: int) -> float:
    """Return an estimate of the KL of best-of-n from scores of the policy's responses, nats.

        KL = sum_s w_s log(w_s / p_s), with w_s = P(x <= s)^n - P(x < s)^n

    over the different scores s, with p_s their shares among `scores`. It counts responses of one
    score as one, so that it is at most the bound, and below it by less the more scores there are.
    """
    shares, total, below = Counter(scores), len(scores), 0
    kl = 0.0
    for score in sorted(shares):
        count = shares[score]
        weight = ((below + count) / total) ** n - (below / total) ** n
        if weight > 0:  # below the smallest float where n is large
            kl += weight * math.log(weight * total / count)
        below += count
    return kl
