"""Totals of what a run has computed, over all resumes."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping

import torch

from lightning_rlhf.core.results import Compute, IterationSeconds
from lightning_rlhf.io.storage import readable

PETA = 1e15
PREFIX = "compute/"
PEAK = f"{PREFIX}peak_memory"


class ComputeTotals:
    """Sums over all iterations, and the largest memory, by the name of their metric.

    Sums of whole numbers are exact up to 2^53, so that a resumed run continues them exactly.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        """Metric -> total so far; empty before the first iteration."""

    def add(
        self, compute: Compute, seconds: IterationSeconds, peak_memory: int
    ) -> dict[str, float]:
        """Add an iteration; return the metrics.

        peak_memory: largest memory of the process, in bytes.
        """
        more = {
            "generated_tokens": compute.generated_tokens,
            "scored_tokens": compute.scored_tokens,
            "trained_tokens": compute.trained_tokens,
            "rollout_flops": compute.rollout_flops,
            "score_flops": compute.score_flops,
            "update_flops": compute.update_flops,
            "flops": compute.flops,
            "device_s": seconds.rollout + seconds.score + seconds.update,
        }
        found = {PREFIX + name: float(number) for name, number in more.items()}
        before = self.totals or dict.fromkeys([*found, PEAK], 0.0)
        self.totals = {name: before[name] + number for name, number in found.items()}
        self.totals[PEAK] = max(before[PEAK], float(peak_memory))
        return dict(self.totals)


def peak_memory(device: torch.device) -> int:
    """Return the largest memory so far in bytes: of tensors on a GPU, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def compute_line(metrics: Mapping[str, float]) -> str:
    """Return the totals of a run in one line."""
    tokens = ", ".join(
        f"{metrics[f'{PREFIX}{name}_tokens']:,.0f} {name}"
        for name in ("generated", "scored", "trained")
    )
    return (
        f"compute: tokens {tokens}; {metrics[f'{PREFIX}flops'] / PETA:.4g} PFLOP; "
        f"{metrics[f'{PREFIX}device_s']:,.1f} device seconds; "
        f"peak memory {readable(int(metrics[PEAK]))}"
    )
