"""Scores of probes, compared with good and bad responses to the same prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.report.scored import ScoredProbe
from lightning_rlhf.rewards.probes import PROBES, ProbeKind


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Result of one kind of probe; medians and means are over the prompts that were probed."""

    kind: ProbeKind
    prompts: int
    """Number of prompts that were probed."""
    mean: float
    median: float
    chosen_median: float
    """Median score of the good responses to the same prompts."""
    rejected_median: float
    """Median score of the rejected responses to the same prompts."""
    beats_chosen: float
    """Share of prompts in which the probe scores above the good response, a tie counting one
    half."""
    example: ScoredProbe
    """Probe whose score is nearest to the median; the first if there are several."""

    @property
    def wins(self) -> bool:
        """Return whether the median is above that of the good responses."""
        return self.median > self.chosen_median


def measure_probes(probes: Sequence[ScoredProbe]) -> tuple[ProbeResult, ...]:
    """Return the result of each kind that was scored, in the order of PROBES.

    Raises:
        RewardError: a score is not a finite number; names the probe.
    """
    for probe in probes:
        if not math.isfinite(probe.score):
            raise RewardError(
                f"probe {probe.kind!r}: its score is {probe.score}; a reward source has to give a "
                f"finite number. Its prompt: {probe.pair.prompt[:80]!r}"
            )
    by_kind = {kind: [probe for probe in probes if probe.kind == kind] for kind in PROBES}
    return tuple(_result(kind, scored) for kind, scored in by_kind.items() if scored)


def _result(kind: ProbeKind, probes: Sequence[ScoredProbe]) -> ProbeResult:
    middle = float(median(probe.score for probe in probes))
    leads = [probe.score - probe.pair.chosen_score for probe in probes]
    return ProbeResult(
        kind=kind,
        prompts=len(probes),
        mean=fmean(probe.score for probe in probes),
        median=middle,
        chosen_median=float(median(probe.pair.chosen_score for probe in probes)),
        rejected_median=float(median(probe.pair.rejected_score for probe in probes)),
        beats_chosen=fmean(0.5 if lead == 0 else float(lead > 0) for lead in leads),
        example=min(probes, key=lambda probe: abs(probe.score - middle)),
    )
