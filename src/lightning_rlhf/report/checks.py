"""Checks of a reward and of preference pairs, their findings, and the advice that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_rlhf.core.errors import counted, percent
from lightning_rlhf.data.problems import LONGER_SHARE, LengthShare, Problem, Problems
from lightning_rlhf.models.checkpoint import Verdict
from lightning_rlhf.report.fitness import LONGER, SHORTER, Fitness, ProbeResult
from lightning_rlhf.rewards.format_check import PROBES

Outcome = Literal["flag", "clear", "not tested"]


@dataclass(frozen=True)
class Check:
    """A check, the threshold from which on it is flagged, and the reason for that threshold."""

    name: str
    threshold: float
    reason: str


ACCURACY = Check(
    "better than guessing", 0.5,
    "guessing ranks half of the pairs right; the whole 95% interval must be above it",
)  # fmt: skip
BEATS_LENGTH = Check(
    "better than length", 0.0,
    "the value is the accuracy less that of always choosing the longer response, or the shorter if "
    "that is right more often; the whole 95% interval must be above that rule's accuracy, else the "
    "accuracy cannot be distinguished from length",
)  # fmt: skip
LENGTH_GAP = Check(
    "length gap", 0.2,
    "a model that is right in 75% of pairs would be right in 85% of one half and 65% of the other; "
    "the 95% interval must exclude 0 as well, so that chance alone is no flag",
)  # fmt: skip
LENGTH_CORRELATION = Check(
    "length within pairs", 0.5,
    "at 0.5 length explains a quarter (its square) of the variance of score differences in a pair",
)  # fmt: skip
OVERCONFIDENCE = Check(
    "overconfidence", 0.1,
    "an ECE of 0.1 is ten points between confidence and accuracy; the 95% interval of confidence "
    "less accuracy must be above 0 as well, because an ECE of few pairs is never 0",
)  # fmt: skip
OUTSIDE = Check(
    "SFT samples off the scale", 0.05,
    "share of samples outside the scores of the pairs; of samples with the distribution of the n "
    "responses of the pairs 2 / (n + 1) are outside by chance, 3.3% for the fewest pairs tested",
)  # fmt: skip
PROBE = Check(
    "probe", 0.0,
    "the value is its median less that of good responses; a response that is worse than a good one "
    "should not score higher",
)  # fmt: skip
DUPLICATES = Check(
    "duplicate pairs", 0.05,
    "share of all pairs; a duplicate counts twice in training and in an interval, and one pair in "
    "twenty is more than chance",
)  # fmt: skip
CONTRADICTIONS = Check(
    "contradicting pairs", 0.02,
    "share of all pairs; one of two contradicting pairs is always ranked wrong, so at 0.02 the "
    "best accuracy is two points below 1",
)  # fmt: skip
LEAKS = Check(
    "held-out prompts trained on", 0.05,
    "share of held-out prompts; the accuracy on them may come from memory, and at 0.05 it may be "
    "five points too high",
)  # fmt: skip
ONE_SIDED = Check(
    "one-sided length", LONGER_SHARE,
    "share of the pairs of different lengths in which one side is longer; beyond it length alone "
    "predicts the label usefully; the 95% interval must exclude 1/2 as well",
)  # fmt: skip
CHECKS = (
    ACCURACY, BEATS_LENGTH, LENGTH_GAP, LENGTH_CORRELATION, OVERCONFIDENCE, OUTSIDE, PROBE,
)  # fmt: skip
"""Checks of a reward."""
PAIR_CHECKS = (DUPLICATES, CONTRADICTIONS, LEAKS, ONE_SIDED)
"""Checks of the pairs, which need no scores."""

MIN_COUNT = 30
"""Minimum number of pairs or samples to judge a share; its standard error is then at most 0.09."""
MIN_PROBES = 5
"""Minimum number of prompts to judge a median; with fewer it is one or two responses' score."""


@dataclass(frozen=True)
class Finding:
    """Outcome of a check."""

    check: Check
    subject: str
    """Name of what was checked: the check's name, with the kind of probe if it is a probe."""
    outcome: Outcome
    value: float | None
    """Measured value; None if there was nothing to measure."""
    words: str
    """Description of the outcome for people."""


def judged(check: Check, flagged: bool, value: float, words: str, if_flagged: str = "") -> Finding:
    """Return the finding of a check that had enough data; a flag's words end with `if_flagged`."""
    if flagged:
        return Finding(check, check.name, "flag", value, words + if_flagged)
    return Finding(check, check.name, "clear", value, words)


def untested(check: Check, value: float | None, words: str) -> Finding:
    """Return the finding of a check that had too few data."""
    return Finding(check, check.name, "not tested", value, words)


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


LOOK_FOR: Sequence[tuple[set[Check], str]] = (
    ({BEATS_LENGTH, LENGTH_GAP, LENGTH_CORRELATION},
     "watch `rollout/response_tokens`, since length may be what is paid"),
    ({OVERCONFIDENCE}, "trust its order more than its distances"),
    ({OUTSIDE}, "distrust the scores where PPO starts, which lie where nobody measured"),
    ({PROBE}, "look in the samples for what the flagged probes show"),
)  # fmt: skip
"""Sets of checks, each with the advice that is given if one of them is flagged."""


def for_ppo(findings: Sequence[Finding], in_pairs: Sequence[Finding]) -> str:
    """Return the advice as a short paragraph.

    Args:
        findings: findings about the reward.
        in_pairs: findings about the pairs; may be empty.
    """
    flags = [finding.check for finding in findings if finding.outcome == "flag"]
    named = [finding.subject for finding in in_pairs if finding.outcome == "flag"]
    untold = any(f.check is ACCURACY and f.outcome == "not tested" for f in findings)
    if untold:
        words = "It may run, but nothing says that what it is paid is what people chose: hold out "
        words += "more pairs, of more prompts, and measure again."
    elif is_unfit(findings):
        words = "Do not run it on this reward: it would maximise what is not surely better than "
        words += "guessing."
    elif flags:
        watched = [advice for checks, advice in LOOK_FOR if checks & set(flags)]
        words = f"It may run, with an eye on the flags: {'; '.join(watched)}."
    else:
        words = "It may run. Read its samples all the same: a reward that rises while they get "
        words += "worse has found a weak spot that no check here looks for."
    if named:
        words += f" The pairs are flagged ({', '.join(named)}): mend them and train again first."
    return words


def metrics(
    fitness: Fitness, probes: Sequence[ProbeResult], findings: Sequence[Finding]
) -> dict[str, float]:
    """Return the scalar measurements by the names they are logged under; undefined ones are left
    out."""
    length, calibration = fitness.length, fitness.calibration
    longer, shorter = length.group(LONGER), length.group(SHORTER)
    low, high = fitness.accuracy.interval or (None, None)
    found: dict[str, float | None] = {
        "accuracy": fitness.accuracy.accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "accuracy_chosen_longer": None if longer is None else longer.accuracy,
        "accuracy_chosen_shorter": None if shorter is None else shorter.accuracy,
        "length_gap": length.gap,
        "length_pearson": length.responses.pearson,
        "length_pearson_within_pairs": length.pairs.pearson,
        "length_pearson_sft": length.samples.pearson,
        "sft_outside": fitness.outside,
        "pairs": float(len(fitness.pairs)),
        "flags": float(sum(finding.outcome == "flag" for finding in findings)),
    }
    if calibration is not None:
        found |= {
            "log_loss": calibration.log_loss,
            "ece": calibration.ece,
            "overconfidence": calibration.overconfidence,
        }
    for probe in probes:
        found[f"probe_{probe.kind}"] = probe.median - probe.chosen_median
    return {f"fitness/{name}": value for name, value in found.items() if value is not None}
