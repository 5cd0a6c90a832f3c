"""Findings of all checks of a reward and of its pairs, and their summaries."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_rlhf.core.wording import counted, percent
from lightning_rlhf.data.problems import LengthShare, Problem, Problems
from lightning_rlhf.models.verdict import Verdict
from lightning_rlhf.report.checks import (
    ACCURACY,
    BEATS_LENGTH,
    CONTRADICTIONS,
    DUPLICATES,
    LEAKS,
    LENGTH_CORRELATION,
    LENGTH_GAP,
    MIN_COUNT,
    MIN_PROBES,
    ONE_SIDED,
    OUTSIDE,
    OVERCONFIDENCE,
    PROBE,
    Check,
    Finding,
    judged,
    untested,
)
from lightning_rlhf.report.fitness import Fitness
from lightning_rlhf.report.length_bias import LONGER, SHORTER
from lightning_rlhf.report.probing import ProbeResult
from lightning_rlhf.rewards.probes import PROBES


def find(fitness: Fitness, probes: Sequence[ProbeResult]) -> tuple[Finding, ...]:
    """Return the finding of every check; none is flagged on too few data."""
    return (
        _accuracy(fitness),
        _beats_length(fitness),
        _length_gap(fitness),
        _length_correlation(fitness),
        _overconfidence(fitness),
        _outside(fitness),
        *(_probe(probe) for probe in probes),
    )


def find_in_pairs(problems: Problems) -> tuple[Finding, ...]:
    """Return the finding of every check of the pairs."""
    shares = [(DUPLICATES, problems.duplicates), (CONTRADICTIONS, problems.contradictions)]
    shares += [] if problems.leaks is None else [(LEAKS, problems.leaks)]
    return (*(_share(check, problem) for check, problem in shares), _one_sided(problems.length))


def about_pairs(findings: Sequence[Finding]) -> str:
    """Return a summary of the findings about the pairs, in two sentences."""
    if any(finding.outcome == "flag" for finding in findings):
        words = "Some are flawed: what is trained or measured on them says less than it seems."
    elif all(finding.outcome == "not tested" for finding in findings):
        words = "Too few to be judged."
    else:
        words = "No check found a fault in them."
    return f"About the pairs: {words} {_counts(findings)}."


def is_unfit(findings: Sequence[Finding]) -> bool:
    """Return whether held-out pairs fail to show that the reward beats guessing."""
    return any(finding.check is ACCURACY and finding.outcome == "flag" for finding in findings)


def judgement(findings: Sequence[Finding]) -> Verdict:
    """Return the verdict that follows from the findings about a reward."""
    flags = [finding for finding in findings if finding.outcome == "flag"]
    reasons = tuple(f"{finding.subject}: {finding.words}" for finding in flags)
    return Verdict(is_unfit(findings), verdict(findings), reasons)


def verdict(findings: Sequence[Finding]) -> str:
    """Return a summary of the findings about a reward, in two sentences."""
    flags = [finding for finding in findings if finding.outcome == "flag"]
    if any(f.check is ACCURACY and f.outcome == "not tested" for f in findings):
        words = (
            f"Not enough data: {MIN_COUNT} held-out pairs, of at least two prompts, are needed to "
            "say if it beats guessing."
        )
    elif is_unfit(findings):
        words = "Not fit: on held-out pairs it is not surely better than guessing."
    elif flags:
        words = "Fit with reservations: PPO will look for the weak spots below."
    else:
        words = "No check found a fault in it."
    return f"{words} {_counts(findings)}."


def _counts(findings: Sequence[Finding]) -> str:
    flags = [finding.subject for finding in findings if finding.outcome == "flag"]
    untold = sum(finding.outcome == "not tested" for finding in findings)
    names = f" ({', '.join(flags)})" if flags else ""
    return f"{len(flags)} of {len(findings)} checks flagged{names}, {untold} not tested"


def _accuracy(fitness: Fitness) -> Finding:
    group = fitness.accuracy
    if group.pairs < MIN_COUNT or group.interval is None:
        words = f"{counted(group.pairs, 'pair')} of {counted(fitness.prompts, 'prompt')}; "
        return untested(ACCURACY, group.accuracy, words + f"{MIN_COUNT} pairs are needed")
    low, high = group.interval
    words = (
        f"ranks {percent(group.accuracy)} of held-out pairs right, interval {percent(low)} to "
        f"{percent(high)}"
    )
    return judged(ACCURACY, low <= ACCURACY.threshold, group.accuracy, words)


def _beats_length(fitness: Fitness) -> Finding:
    group, longer = fitness.accuracy, fitness.length.longer_is_right
    rule, side = max((longer, "longer"), (1 - longer, "shorter"))
    lead = group.accuracy - rule
    if group.pairs < MIN_COUNT or group.interval is None:
        words = f"{counted(group.pairs, 'pair')} of {counted(fitness.prompts, 'prompt')}; "
        return untested(BEATS_LENGTH, lead, words + f"{MIN_COUNT} pairs are needed")
    words = (
        f"ranks {percent(group.accuracy)} of held-out pairs right; always taking the {side} "
        f"response is right in {percent(rule)}"
    )
    qualification = "; length alone may explain its accuracy"
    return judged(BEATS_LENGTH, group.interval[0] <= rule, lead, words, qualification)


def _length_gap(fitness: Fitness) -> Finding:
    length = fitness.length
    groups = length.group(LONGER), length.group(SHORTER)
    counts = [0 if group is None else group.pairs for group in groups]
    if length.gap is None or length.gap_interval is None or min(counts) < MIN_COUNT:
        words = f"chosen is longer in {counts[0]} pairs and shorter in {counts[1]}; "
        return untested(LENGTH_GAP, length.gap, words + f"{MIN_COUNT} of each are needed")
    low, high = length.gap_interval
    assert length.model_prefers_longer is not None  # since there is a gap
    assert length.people_prefer_longer is not None
    taste = "longer" if length.gap > 0 else "shorter"
    words = (
        f"accuracy where chosen is longer less where it is shorter is {length.gap:+z.2f}, interval "
        f"{low:+z.2f} to {high:+z.2f}; the longer response scores higher in "
        f"{percent(length.model_prefers_longer, 0)} of pairs, and was chosen in "
        f"{percent(length.people_prefer_longer, 0)}"
    )
    flagged = abs(length.gap) >= LENGTH_GAP.threshold and not low <= 0 <= high
    return judged(LENGTH_GAP, flagged, length.gap, words, f"; it prefers the {taste} response")


def _length_correlation(fitness: Fitness) -> Finding:
    found = fitness.length.pairs
    if found.points < MIN_COUNT:
        words = f"{counted(found.points, 'pair')}; {MIN_COUNT} are needed"
        return untested(LENGTH_CORRELATION, found.pearson, words)
    if found.pearson is None:
        words = "undefined: the differences of score or of length are all equal"
        return untested(LENGTH_CORRELATION, None, words)
    words = f"difference of score and difference of length correlate by {found.pearson:+z.2f}"
    flagged = abs(found.pearson) >= LENGTH_CORRELATION.threshold
    return judged(LENGTH_CORRELATION, flagged, found.pearson, words)


def _overconfidence(fitness: Fitness) -> Finding:
    found = fitness.calibration
    if found is None:
        words = "the source's scores are no log-odds, so that it states no confidence"
        return untested(OVERCONFIDENCE, None, words)
    if fitness.accuracy.pairs < MIN_COUNT or found.overconfidence_interval is None:
        words = f"{counted(fitness.accuracy.pairs, 'pair')}; {MIN_COUNT} are needed"
        return untested(OVERCONFIDENCE, found.ece, words)
    low, high = found.overconfidence_interval
    words = (
        f"ECE is {found.ece:.3f} (a calibrated model would show {found.ece_of_calibrated:.3f} by "
        f"chance); confidence less accuracy is {found.overconfidence:+z.3f}, interval "
        f"{low:+z.3f} to {high:+z.3f}"
    )
    flagged = found.ece >= OVERCONFIDENCE.threshold and low > 0
    return judged(OVERCONFIDENCE, flagged, found.ece, words)


def _outside(fitness: Fitness) -> Finding:
    samples, pairs = len(fitness.samples), len(fitness.pairs)
    if fitness.outside is None or min(samples, pairs) < MIN_COUNT:
        words = f"{counted(samples, 'SFT sample')} and {counted(pairs, 'pair')}; "
        return untested(OUTSIDE, fitness.outside, words + f"{MIN_COUNT} of each are needed")
    words = (
        f"{percent(fitness.outside)} of SFT samples score above or below every response of the "
        f"pairs ({percent(2 / (2 * pairs + 1))} would by chance)"
    )
    return judged(OUTSIDE, fitness.outside > OUTSIDE.threshold, fitness.outside, words)


def _probe(probe: ProbeResult) -> Finding:
    lead = probe.median - probe.chosen_median
    subject = f"{PROBE.name} {probe.kind.replace('_', ' ')}"
    if probe.prompts < MIN_PROBES:
        words = f"{counted(probe.prompts, 'prompt')}; {MIN_PROBES} are needed"
        return Finding(PROBE, subject, "not tested", lead, words)
    words = (
        f"{PROBES[probe.kind]}: median {probe.median:z.2f}, of good responses "
        f"{probe.chosen_median:z.2f}"
    )
    if probe.wins:
        return Finding(PROBE, subject, "flag", lead, f"a way the policy may cheat: {words}")
    return Finding(PROBE, subject, "clear", lead, words)


def _share(check: Check, problem: Problem) -> Finding:
    if problem.of < MIN_COUNT:
        return untested(check, None, f"{problem.of:,} {problem.unit}; {MIN_COUNT} are needed")
    share = problem.count / problem.of
    return judged(check, share >= check.threshold, share, problem.line)


def _one_sided(length: LengthShare) -> Finding:
    differ = length.longer + length.shorter
    if length.share is None or differ < MIN_COUNT:
        words = f"{counted(differ, 'pair')} of different lengths; {MIN_COUNT} are needed"
        return untested(ONE_SIDED, None, words)
    share = max(length.share, 1 - length.share)
    return judged(ONE_SIDED, length.one_sided, share, length.line)
