"""Totals of what a run has computed, over all resumes."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_rlhf.callbacks.contract import position
from lightning_rlhf.callbacks.metric_rows import Rows
from lightning_rlhf.callbacks.terminal import print_line
from lightning_rlhf.core.results import Compute, IterationSeconds, StepCompute
from lightning_rlhf.io.storage import readable

PETA = 1e15
PREFIX = "compute/"
PEAK = f"{PREFIX}peak_memory"


class ComputeTotals:
    """Sums over all iterations or steps, and the largest memory, by the name of their metric.

    Sums of whole numbers are exact up to 2^53, so that a resumed run continues them exactly.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        """Metric -> total so far; empty before the first iteration."""

    def add(self, more: Mapping[str, float], peak_memory: int) -> dict[str, float]:
        """Add an iteration or step; return the metrics.

        more: what it computed, as `iteration_totals` and `step_totals` return it.
        peak_memory: largest memory of the process, in bytes.
        """
        found = {PREFIX + name: float(number) for name, number in more.items()}
        before = self.totals or dict.fromkeys([*found, PEAK], 0.0)
        self.totals = {name: before[name] + number for name, number in found.items()}
        self.totals[PEAK] = max(before[PEAK], float(peak_memory))
        return dict(self.totals)


class CountedRows(Rows):
    """Rows of metrics with the totals of what the run has computed."""

    unit = "step"
    """Name of what the rows count."""

    def __init__(self) -> None:
        self._compute = ComputeTotals()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print from where the totals count, where a checkpoint has none."""
        super().on_train_start(trainer, pl_module)
        if (finished := position(trainer, pl_module)) > 0 and not self._compute.totals:
            print_line(
                f"compute/… counts from {self.unit} {finished + 1}: the checkpoint has no totals"
            )


def iteration_totals(
    compute: Compute, seconds: IterationSeconds, devices: int = 1
) -> dict[str, float]:
    """Return what an iteration of PPO computed, by the name of its metric without the prefix.

    devices: number of processes of the run, each on a device of its own.
    """
    return {
        "generated_tokens": compute.generated_tokens,
        "scored_tokens": compute.scored_tokens,
        "trained_tokens": compute.trained_tokens,
        "rollout_flops": compute.rollout_flops,
        "score_flops": compute.score_flops,
        "update_flops": compute.update_flops,
        "flops": compute.flops,
        "device_s": devices * (seconds.rollout + seconds.score + seconds.update),
    }


def step_totals(compute: StepCompute, devices: int = 1) -> dict[str, float]:
    """Return what a step of SFT or a reward model computed, likewise."""
    return {
        "trained_tokens": compute.trained_tokens,
        "flops": compute.flops,
        "device_s": devices * compute.seconds,
    }


def peak_memory(device: torch.device) -> int:
    """Return the largest memory so far in bytes: of tensors on a GPU, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def sum_of(stages: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the totals of several stages together, and the largest of their peaks of memory."""
    names = {name: None for metrics in stages for name in metrics if name.startswith(PREFIX)}
    measured = {name: [m[name] for m in stages if name in m] for name in names}
    return {name: max(x) if name == PEAK else sum(x) for name, x in measured.items()}


def compute_line(metrics: Mapping[str, float], of: str = "") -> str:
    """Return the totals of a run in one line.

    of: words that say whose totals these are, with a space before them.
    """
    tokens = ", ".join(
        f"{metrics[f'{PREFIX}{name}_tokens']:,.0f} {name}"
        for name in ("generated", "scored", "trained")
        if f"{PREFIX}{name}_tokens" in metrics
    )
    return (
        f"compute{of}: tokens {tokens}; {metrics[f'{PREFIX}flops'] / PETA:.4g} PFLOP; "
        f"{metrics[f'{PREFIX}device_s']:,.1f} device seconds; "
        f"peak memory {readable(int(metrics[PEAK]))}"
    )
