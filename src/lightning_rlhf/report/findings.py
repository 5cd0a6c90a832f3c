"""Checks of a reward source in words, each with its number and its threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_rlhf.report.fitness import Fitness
from lightning_rlhf.report.length_bias import LONGER, SHORTER
from lightning_rlhf.report.markdown import counted
from lightning_rlhf.report.probing import ProbeResult
from lightning_rlhf.rewards.probes import PROBES

Outcome = Literal["flag", "clear", "not tested"]


@dataclass(frozen=True)
class Check:
    """What is asked, the number from which on it is a flag, and why that one."""

    name: str
    threshold: float
    reason: str


ACCURACY = Check(
    "better than guessing", 0.5,
    "guessing ranks half of the pairs right; the whole 95% interval has to lie above it",
)  # fmt: skip
LENGTH_GAP = Check(
    "length gap", 0.2,
    "a model that is right in 75% of pairs would be right in 85% of one half and 65% of the other; "
    "the 95% interval has to leave 0 out as well, so that chance alone is no flag",
)  # fmt: skip
LENGTH_CORRELATION = Check(
    "length within pairs", 0.5,
    "at 0.5 length explains a quarter (its square) of what sets the scores of two responses apart",
)  # fmt: skip
OVERCONFIDENCE = Check(
    "overconfidence", 0.1,
    "an ECE of 0.1 is ten points between how sure and how often right; the 95% interval of "
    "confidence less accuracy has to lie above 0 as well, as few pairs alone make an ECE",
)  # fmt: skip
OUTSIDE = Check(
    "SFT samples off the scale", 0.05,
    "of samples that score like the n responses of the pairs 2 / (n + 1) fall outside by chance, "
    "3.3% for the fewest pairs that are judged",
)  # fmt: skip
PROBE = Check(
    "probe", 0.0,
    "measured is its median less that of good responses; what deserves less than a good response "
    "should not score more",
)  # fmt: skip
CHECKS = (ACCURACY, LENGTH_GAP, LENGTH_CORRELATION, OVERCONFIDENCE, OUTSIDE, PROBE)

MIN_COUNT = 30
"""Pairs or samples without which a share is not judged: its standard error is up to 0.09."""
MIN_PROBES = 5
"""Prompts without which a median is not judged: of fewer it is one or two responses' score."""


@dataclass(frozen=True)
class Finding:
    """The outcome of a check."""

    check: Check
    subject: str
    """What was checked: the check's name, with the kind of probe where it is one."""
    outcome: Outcome
    value: float | None
    """None where there was nothing to measure."""
    words: str


def find(fitness: Fitness, probes: Sequence[ProbeResult]) -> tuple[Finding, ...]:
    """Every check with its outcome; nothing is flagged for which there are too few data."""
    return (
        _accuracy(fitness),
        _length_gap(fitness),
        _length_correlation(fitness),
        _overconfidence(fitness),
        _outside(fitness),
        *(_probe(probe) for probe in probes),
    )


def verdict(findings: Sequence[Finding]) -> str:
    """All findings in two sentences."""
    flags = [finding for finding in findings if finding.outcome == "flag"]
    untested = [finding for finding in findings if finding.outcome == "not tested"]
    if any(finding.check is ACCURACY for finding in untested):
        words = "Cannot be told: too few held-out pairs or prompts to say if it beats guessing."
    elif any(finding.check is ACCURACY for finding in flags):
        words = "Not fit: on held-out pairs it is not surely better than guessing."
    elif flags:
        words = "Fit with reservations: PPO will look for the weak spots below."
    else:
        words = "No check speaks against it."
    names = f" ({', '.join(finding.subject for finding in flags)})" if flags else ""
    counts = f"{len(flags)} of {len(findings)} checks flagged{names}, {len(untested)} not tested"
    return f"{words} {counts}."


def _accuracy(fitness: Fitness) -> Finding:
    group = fitness.accuracy
    if group.pairs < MIN_COUNT or group.interval is None:
        words = f"{counted(group.pairs, 'pair')} of {counted(fitness.prompts, 'prompt')}; "
        return _untested(ACCURACY, group.accuracy, words + f"{MIN_COUNT} pairs are needed")
    low, high = group.interval
    words = f"ranks {group.accuracy:.1%} of held-out pairs right, interval {low:.1%} to {high:.1%}"
    return _judged(ACCURACY, low <= ACCURACY.threshold, group.accuracy, words)


def _length_gap(fitness: Fitness) -> Finding:
    length = fitness.length
    groups = length.group(LONGER), length.group(SHORTER)
    counts = [0 if group is None else group.pairs for group in groups]
    if length.gap is None or length.gap_interval is None or min(counts) < MIN_COUNT:
        words = f"chosen is longer in {counts[0]} pairs and shorter in {counts[1]}; "
        return _untested(LENGTH_GAP, length.gap, words + f"{MIN_COUNT} of each are needed")
    low, high = length.gap_interval
    taste = "longer" if length.gap > 0 else "shorter"
    words = (
        f"accuracy where chosen is longer less where it is shorter is {length.gap:+.2f}, interval "
        f"{low:+.2f} to {high:+.2f}; the longer response scores higher in "
        f"{length.model_prefers_longer:.0%} of pairs, and was chosen in "
        f"{length.people_prefer_longer:.0%}"
    )
    flagged = abs(length.gap) >= LENGTH_GAP.threshold and not low <= 0 <= high
    return _judged(LENGTH_GAP, flagged, length.gap, words, f"; it prefers the {taste} response")


def _length_correlation(fitness: Fitness) -> Finding:
    found = fitness.length.pairs
    if found.points < MIN_COUNT:
        words = f"{counted(found.points, 'pair')}; {MIN_COUNT} are needed"
        return _untested(LENGTH_CORRELATION, found.pearson, words)
    if found.pearson is None:
        words = "undefined: the differences of score or of length are all equal"
        return _untested(LENGTH_CORRELATION, None, words)
    words = f"difference of score and difference of length correlate by {found.pearson:+.2f}"
    flagged = abs(found.pearson) >= LENGTH_CORRELATION.threshold
    return _judged(LENGTH_CORRELATION, flagged, found.pearson, words)


def _overconfidence(fitness: Fitness) -> Finding:
    found = fitness.calibration
    if found is None:
        words = "the source's scores are no log-odds, so that it states no confidence"
        return _untested(OVERCONFIDENCE, None, words)
    if fitness.accuracy.pairs < MIN_COUNT or found.overconfidence_interval is None:
        words = f"{counted(fitness.accuracy.pairs, 'pair')}; {MIN_COUNT} are needed"
        return _untested(OVERCONFIDENCE, found.ece, words)
    low, high = found.overconfidence_interval
    words = (
        f"ECE is {found.ece:.3f} (a calibrated model would show {found.ece_of_calibrated:.3f} by "
        f"chance); confidence less accuracy is {found.overconfidence:+.3f}, interval "
        f"{low:+.3f} to {high:+.3f}"
    )
    flagged = found.ece >= OVERCONFIDENCE.threshold and low > 0
    return _judged(OVERCONFIDENCE, flagged, found.ece, words)


def _outside(fitness: Fitness) -> Finding:
    samples, pairs = len(fitness.samples), len(fitness.pairs)
    if fitness.outside is None or min(samples, pairs) < MIN_COUNT:
        words = f"{counted(samples, 'SFT sample')} and {counted(pairs, 'pair')}; "
        return _untested(OUTSIDE, fitness.outside, words + f"{MIN_COUNT} of each are needed")
    words = (
        f"{fitness.outside:.1%} of SFT samples score above or below every response of the pairs "
        f"({2 / (2 * pairs + 1):.1%} would by chance)"
    )
    return _judged(OUTSIDE, fitness.outside > OUTSIDE.threshold, fitness.outside, words)


def _probe(probe: ProbeResult) -> Finding:
    lead = probe.median - probe.chosen_median
    subject = f"{PROBE.name} {probe.kind.replace('_', ' ')}"
    if probe.prompts < MIN_PROBES:
        words = f"{counted(probe.prompts, 'prompt')}; {MIN_PROBES} are needed"
        return Finding(PROBE, subject, "not tested", lead, words)
    words = (
        f"{PROBES[probe.kind]}: median {probe.median:.2f}, of good responses "
        f"{probe.chosen_median:.2f}"
    )
    if probe.wins:
        return Finding(PROBE, subject, "flag", lead, f"a way the policy may cheat: {words}")
    return Finding(PROBE, subject, "clear", lead, words)


def _judged(check: Check, flagged: bool, value: float, words: str, if_flagged: str = "") -> Finding:
    if flagged:
        return Finding(check, check.name, "flag", value, words + if_flagged)
    return Finding(check, check.name, "clear", value, words)


def _untested(check: Check, value: float | None, words: str) -> Finding:
    return Finding(check, check.name, "not tested", value, words)
