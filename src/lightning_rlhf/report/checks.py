"""Checks of a reward and of preference pairs, their findings, and the advice that follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_rlhf.core.errors import counted, percent
from lightning_rlhf.data.problems import LONGER_SHARE, LengthShare, Problem, Problems
from lightning_rlhf.models.checkpoint import Verdict
from lightning_rlhf.report.fitness import LONGER, SHORTER, Fitness, ProbeResult
from lightning_rlhf.rewards.format_check import PROBES

Outcome = Literal["flag", "clear", "not tested"]
OUTCOMES: dict[bool | None, Outcome] = {True: "flag", False: "clear", None: "not tested"}
Measured = tuple[bool | None, float | None, str]
"""Flag of a check, None where there are too few data; its value, None if nothing was measured; and
the text of both."""


@dataclass(frozen=True)
class FitnessCheck:
    """A check, the threshold from which on it is flagged, and the reason for that threshold."""

    name: str
    threshold: float
    reason: str


@dataclass(frozen=True)
class Finding:
    """Outcome of a check."""

    check: FitnessCheck
    subject: str
    """Name of what was checked: the check's name, with the kind of probe if it is a probe."""
    outcome: Outcome
    value: float | None
    """Measured value; None if there was nothing to measure."""
    words: str
    """Description of the outcome for people."""


ACCURACY = FitnessCheck(
    "better than guessing", 0.5,
    "guessing ranks half of the pairs right; the whole 95% interval must be above it",
)  # fmt: skip
BEATS_LENGTH = FitnessCheck(
    "better than length", 0.0,
    "the value is the accuracy less that of always choosing the longer response, or the shorter if "
    "that is right more often; the whole 95% interval must be above that rule's accuracy, else the "
    "accuracy cannot be distinguished from length",
)  # fmt: skip
LENGTH_GAP = FitnessCheck(
    "length gap", 0.2,
    "a model that is right in 75% of pairs would be right in 85% of one half and 65% of the other; "
    "the 95% interval must exclude 0 as well, so that chance alone is no flag",
)  # fmt: skip
LENGTH_CORRELATION = FitnessCheck(
    "length within pairs", 0.5,
    "at 0.5 length explains a quarter (its square) of the variance of score differences in a pair",
)  # fmt: skip
OVERCONFIDENCE = FitnessCheck(
    "overconfidence", 0.1,
    "an ECE of 0.1 is ten points between confidence and accuracy; the 95% interval of confidence "
    "less accuracy must be above 0 as well, because an ECE of few pairs is never 0",
)  # fmt: skip
OUTSIDE = FitnessCheck(
    "SFT samples off the scale", 0.05,
    "share of samples outside the scores of the pairs; of samples with the distribution of the n "
    "responses of the pairs 2 / (n + 1) are outside by chance, 3.3% for the fewest pairs tested",
)  # fmt: skip
PROBE = FitnessCheck(
    "probe", 0.0,
    "the value is its median less that of good responses; a response that is worse than a good one "
    "should not score higher",
)  # fmt: skip
DUPLICATES = FitnessCheck(
    "duplicate pairs", 0.05,
    "share of all pairs; a duplicate counts twice in training and in an interval, and one pair in "
    "twenty is more than chance",
)  # fmt: skip
CONTRADICTIONS = FitnessCheck(
    "contradicting pairs", 0.02,
    "share of all pairs; one of two contradicting pairs is always ranked wrong, so at 0.02 the "
    "best accuracy is two points below 1",
)  # fmt: skip
LEAKS = FitnessCheck(
    "held-out prompts trained on", 0.05,
    "share of held-out prompts; the accuracy on them may come from memory, and at 0.05 it may be "
    "five points too high",
)  # fmt: skip
ONE_SIDED = FitnessCheck(
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


def find(fitness: Fitness, probes: Sequence[ProbeResult]) -> tuple[Finding, ...]:
    """Return the finding of every check of the reward; none is flagged on too few data."""
    found = [
        _finding(check, check.name, measure(fitness, check.threshold))
        for check, measure in zip(CHECKS, MEASURES, strict=False)
    ]
    names = (f"{PROBE.name} {probe.kind.replace('_', ' ')}" for probe in probes)
    found += [_finding(PROBE, *one) for one in zip(names, map(of_probe, probes), strict=True)]
    return tuple(found)


def find_in_pairs(problems: Problems) -> tuple[Finding, ...]:
    """Return the finding of every check of the pairs."""
    shares = [(DUPLICATES, problems.duplicates), (CONTRADICTIONS, problems.contradictions)]
    shares += [] if problems.leaks is None else [(LEAKS, problems.leaks)]
    found = [_finding(check, check.name, of_share(x, check.threshold)) for check, x in shares]
    return (*found, _finding(ONE_SIDED, ONE_SIDED.name, of_length(problems.length)))


def _finding(check: FitnessCheck, subject: str, measured: Measured) -> Finding:
    is_flagged, value, words = measured
    return Finding(check, subject, OUTCOMES[is_flagged], value, words)


def too_few(fitness: Fitness, value: float | None) -> Measured | None:
    """Return that the pairs are too few to judge their accuracy; None if they are not."""
    pairs = fitness.accuracy.pairs
    if pairs >= MIN_COUNT and fitness.accuracy.interval is not None:
        return None
    there = f"{counted(pairs, 'pair')} of {counted(fitness.prompts, 'prompt')}"
    return None, value, f"{there}; {MIN_COUNT} pairs are needed"


def beats_guessing(fitness: Fitness, threshold: float) -> Measured:
    group = fitness.accuracy
    if (few := too_few(fitness, group.accuracy)) is not None:
        return few
    assert group.interval is not None
    low, high = group.interval
    words = (
        f"ranks {percent(group.accuracy)} of held-out pairs right, interval {percent(low)} to "
        f"{percent(high)}"
    )
    return low <= threshold, group.accuracy, words


def beats_length(fitness: Fitness, threshold: float) -> Measured:
    group, longer = fitness.accuracy, fitness.length.longer_is_right
    rule, side = max((longer, "longer"), (1 - longer, "shorter"))
    lead = group.accuracy - rule
    if (few := too_few(fitness, lead)) is not None:
        return few
    assert group.interval is not None
    words = (
        f"ranks {percent(group.accuracy)} of held-out pairs right; always taking the {side} "
        f"response is right in {percent(rule)}"
    )
    is_flagged = group.interval[0] <= rule + threshold
    return is_flagged, lead, words + "; length alone may explain its accuracy" * is_flagged


def length_gap(fitness: Fitness, threshold: float) -> Measured:
    length = fitness.length
    groups = length.group(LONGER), length.group(SHORTER)
    counts = [0 if group is None else group.pairs for group in groups]
    if length.gap is None or length.gap_interval is None or min(counts) < MIN_COUNT:
        words = f"chosen is longer in {counts[0]} pairs and shorter in {counts[1]}; "
        return None, length.gap, words + f"{MIN_COUNT} of each are needed"
    low, high = length.gap_interval
    assert length.model_prefers_longer is not None  # since there is a gap
    assert length.people_prefer_longer is not None
    words = (
        f"accuracy where chosen is longer less where it is shorter is {length.gap:+z.2f}, interval "
        f"{low:+z.2f} to {high:+z.2f}; the longer response scores higher in "
        f"{percent(length.model_prefers_longer, 0)} of pairs, and was chosen in "
        f"{percent(length.people_prefer_longer, 0)}"
    )
    is_flagged = abs(length.gap) >= threshold and not low <= 0 <= high
    taste = "longer" if length.gap > 0 else "shorter"
    return is_flagged, length.gap, words + f"; it prefers the {taste} response" * is_flagged


def length_correlation(fitness: Fitness, threshold: float) -> Measured:
    found = fitness.length.pairs
    if found.points < MIN_COUNT:
        words = f"{counted(found.points, 'pair')}; {MIN_COUNT} are needed"
        return None, found.pearson, words
    if found.pearson is None:
        words = "undefined: the differences of score or of length are all equal"
        return None, None, words
    words = f"difference of score and difference of length correlate by {found.pearson:+z.2f}"
    return abs(found.pearson) >= threshold, found.pearson, words


def overconfidence(fitness: Fitness, threshold: float) -> Measured:
    found = fitness.calibration
    if found is None:
        words = "the source's scores are no log-odds, so that it states no confidence"
        return None, None, words
    if fitness.accuracy.pairs < MIN_COUNT or found.overconfidence_interval is None:
        words = f"{counted(fitness.accuracy.pairs, 'pair')}; {MIN_COUNT} are needed"
        return None, found.ece, words
    low, high = found.overconfidence_interval
    words = (
        f"ECE is {found.ece:.3f} (a calibrated model would show {found.ece_of_calibrated:.3f} by "
        f"chance); confidence less accuracy is {found.overconfidence:+z.3f}, interval "
        f"{low:+z.3f} to {high:+z.3f}"
    )
    return found.ece >= threshold and low > 0, found.ece, words


def off_the_scale(fitness: Fitness, threshold: float) -> Measured:
    samples, pairs = len(fitness.samples), len(fitness.pairs)
    if fitness.outside is None or min(samples, pairs) < MIN_COUNT:
        words = f"{counted(samples, 'SFT sample')} and {counted(pairs, 'pair')}; "
        return None, fitness.outside, words + f"{MIN_COUNT} of each are needed"
    words = (
        f"{percent(fitness.outside)} of SFT samples score above or below every response of the "
        f"pairs ({percent(2 / (2 * pairs + 1))} would by chance)"
    )
    return fitness.outside > threshold, fitness.outside, words


MEASURES: tuple[Callable[[Fitness, float], Measured], ...] = (
    beats_guessing, beats_length, length_gap, length_correlation, overconfidence, off_the_scale,
)  # fmt: skip
"""Functions of the measurements and the threshold, in the order of CHECKS; PROBE has another."""


def of_probe(probe: ProbeResult) -> Measured:
    if probe.prompts < MIN_PROBES:
        words = f"{counted(probe.prompts, 'prompt')}; {MIN_PROBES} are needed"
        return None, probe.lead, words
    words = (
        f"{PROBES[probe.kind]}: median {probe.median:z.2f}, of good responses "
        f"{probe.chosen_median:z.2f}"
    )
    wins = probe.median > probe.chosen_median
    return wins, probe.lead, "a way the policy may cheat: " * wins + words


def of_share(problem: Problem, threshold: float) -> Measured:
    if problem.of < MIN_COUNT:
        return None, None, f"{problem.of:,} {problem.unit}; {MIN_COUNT} are needed"
    share = problem.count / problem.of
    return share >= threshold, share, problem.line


def of_length(length: LengthShare) -> Measured:
    differ = length.longer + length.shorter
    if length.share is None or differ < MIN_COUNT:
        words = f"{counted(differ, 'pair')} of different lengths; {MIN_COUNT} are needed"
        return None, None, words
    return length.one_sided, max(length.share, 1 - length.share), length.line


Standing = Literal["unknown", "unfit", "flagged", "clear"]
WORDS: dict[Standing, str] = {
    "unknown": f"Not enough data: {MIN_COUNT} held-out pairs, of at least two prompts, are needed "
    "to say if it beats guessing.",
    "unfit": "Not fit: on held-out pairs it is not surely better than guessing.",
    "flagged": "Fit with reservations: PPO will look for the weak spots below.",
    "clear": "No check found a fault in it.",
}
"""Conclusion of the findings about a reward."""
FOR_PPO: dict[Standing, str] = {
    "unknown": "It may run, but nothing says that what it is paid is what people chose: hold out "
    "more pairs, of more prompts, and measure again.",
    "unfit": "Do not run it on this reward: it would maximise what is not surely better than "
    "guessing.",
    "flagged": "It may run, with an eye on the flags: {}.",
    "clear": "It may run. Read its samples all the same: a reward that rises while they get worse "
    "has found a weak spot that no check here looks for.",
}
"""Consequence for PPO."""
LOOK_FOR: Sequence[tuple[set[FitnessCheck], str]] = (
    ({BEATS_LENGTH, LENGTH_GAP, LENGTH_CORRELATION},
     "watch `rollout/response_tokens`, since length may be what is paid"),
    ({OVERCONFIDENCE}, "trust its order more than its distances"),
    ({OUTSIDE}, "distrust the scores where PPO starts, which lie where nobody measured"),
    ({PROBE}, "look in the samples for what the flagged probes show"),
)  # fmt: skip
"""Sets of checks, each with the advice that is given if one of them is flagged."""


def flagged(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that are flags."""
    return [finding for finding in findings if finding.outcome == "flag"]


def standing(findings: Sequence[Finding]) -> Standing:
    """Return what the findings about a reward come to."""
    outcomes = {f.outcome for f in findings if f.check is ACCURACY}
    if "not tested" in outcomes:
        return "unknown"
    if "flag" in outcomes:
        return "unfit"
    return "flagged" if flagged(findings) else "clear"


def summary(words: str, findings: Sequence[Finding]) -> str:
    """Return the words and how many of the checks are flagged and not tested."""
    flags = [finding.subject for finding in flagged(findings)]
    untold = sum(finding.outcome == "not tested" for finding in findings)
    names = f" ({', '.join(flags)})" if flags else ""
    return f"{words} {len(flags)} of {len(findings)} checks flagged{names}, {untold} not tested."


def about_pairs(findings: Sequence[Finding]) -> str:
    """Return a summary of the findings about the pairs, in two sentences."""
    words = "No check found a fault in them."
    if flagged(findings):
        words = "Some are flawed: what is trained or measured on them says less than it seems."
    elif all(finding.outcome == "not tested" for finding in findings):
        words = "Too few to be judged."
    return f"About the pairs: {summary(words, findings)}"


def judgement(findings: Sequence[Finding]) -> Verdict:
    """Return the verdict that follows from the findings about a reward, in two sentences."""
    reasons = tuple(f"{finding.subject}: {finding.words}" for finding in flagged(findings))
    found = standing(findings)
    return Verdict(found == "unfit", summary(WORDS[found], findings), reasons)


def for_ppo(findings: Sequence[Finding], in_pairs: Sequence[Finding]) -> str:
    """Return the advice as a short paragraph.

    findings: about the reward; in_pairs: about the pairs, may be empty.
    """
    flags = {finding.check for finding in flagged(findings)}
    watched = [advice for checks, advice in LOOK_FOR if checks & flags]
    words = FOR_PPO[standing(findings)].format("; ".join(watched))
    if named := [finding.subject for finding in flagged(in_pairs)]:
        words += f" The pairs are flagged ({', '.join(named)}): mend them and train again first."
    return words


def fitness_metrics(
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
        "flags": float(len(flagged(findings))),
    }
    if calibration is not None:
        found |= {
            name: getattr(calibration, name) for name in ("log_loss", "ece", "overconfidence")
        }
    found |= {f"probe_{probe.kind}": probe.lead for probe in probes}
    return {f"fitness/{name}": value for name, value in found.items() if value is not None}
