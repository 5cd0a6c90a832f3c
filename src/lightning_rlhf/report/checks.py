"""Checks of a reward and of preference pairs, their findings, and the advice that follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_rlhf.core.errors import counted, percent
from lightning_rlhf.data.problems import LONGER_SHARE, Problems
from lightning_rlhf.models.checkpoint import Verdict
from lightning_rlhf.report.fitness import LONGER, SHORTER, Fitness, ProbeResult
from lightning_rlhf.rewards.format_check import PROBES

Outcome = Literal["flag", "clear", "not tested"]
OUTCOMES: dict[bool | None, Outcome] = {True: "flag", False: "clear", None: "not tested"}


@dataclass(frozen=True)
class FitnessCheck:
    """A check, the threshold from which on it is flagged, and the reason for that threshold."""

    name: str
    threshold: float
    reason: str

    def finds(
        self, is_flagged: bool | None, value: float | None, words: str, subject: str = ""
    ) -> Finding:
        """Return the finding; is_flagged: None where there are too few data."""
        return Finding(self, subject or self.name, OUTCOMES[is_flagged], value, words)


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


CHECKS = (
    FitnessCheck(
        "better than guessing", 0.5,
        "guessing ranks half of the pairs right; the whole 95% interval must be above it"),
    FitnessCheck(
        "better than length", 0.0,
        "the value is the accuracy less that of always choosing the longer response, or the "
        "shorter if that is right more often; the whole 95% interval must be above that rule's "
        "accuracy, else the accuracy cannot be distinguished from length"),
    FitnessCheck(
        "length gap", 0.2,
        "a model that is right in 75% of pairs would be right in 85% of one half and 65% of the "
        "other; the 95% interval must exclude 0 as well, so that chance alone is no flag"),
    FitnessCheck(
        "length within pairs", 0.5,
        "at 0.5 length explains a quarter (its square) of the variance of score differences in a "
        "pair"),
    FitnessCheck(
        "overconfidence", 0.1,
        "an ECE of 0.1 is ten points between confidence and accuracy; the 95% interval of "
        "confidence less accuracy must be above 0 as well, because an ECE of few pairs is never 0"),
    FitnessCheck(
        "SFT samples off the scale", 0.05,
        "share of samples outside the scores of the pairs; of samples with the distribution of the "
        "n responses of the pairs 2 / (n + 1) are outside by chance, 3.3% for the fewest pairs "
        "tested"),
    FitnessCheck(
        "probe", 0.0,
        "the value is its median less that of good responses; a response that is worse than a good "
        "one should not score higher"),
)  # fmt: skip
"""Checks of a reward."""
ACCURACY, BEATS_LENGTH, LENGTH_GAP, LENGTH_CORRELATION, OVERCONFIDENCE, OUTSIDE, PROBE = CHECKS
PAIR_CHECKS = (
    FitnessCheck(
        "duplicate pairs", 0.05,
        "share of all pairs; a duplicate counts twice in training and in an interval, and one pair "
        "in twenty is more than chance"),
    FitnessCheck(
        "contradicting pairs", 0.02,
        "share of all pairs; one of two contradicting pairs is always ranked wrong, so at 0.02 the "
        "best accuracy is two points below 1"),
    FitnessCheck(
        "held-out prompts trained on", 0.05,
        "share of held-out prompts; the accuracy on them may come from memory, and at 0.05 it may "
        "be five points too high"),
    FitnessCheck(
        "one-sided length", LONGER_SHARE,
        "share of the pairs of different lengths in which one side is longer; beyond it length "
        "alone predicts the label usefully; the 95% interval must exclude 1/2 as well"),
)  # fmt: skip
"""Checks of the pairs, which need no scores."""
DUPLICATES, CONTRADICTIONS, LEAKS, ONE_SIDED = PAIR_CHECKS

MIN_COUNT = 30
"""Minimum number of pairs or samples to judge a share; its standard error is then at most 0.09."""
MIN_PROBES = 5
"""Minimum number of prompts to judge a median; with fewer it is one or two responses' score."""


def find(fitness: Fitness, probes: Sequence[ProbeResult]) -> tuple[Finding, ...]:
    """Return the finding of every check of the reward; none is flagged on too few data."""
    return (
        *of_accuracy(fitness),
        *of_length(fitness),
        of_confidence(fitness),
        of_scale(fitness),
        *map(of_probe, probes),
    )


def of_accuracy(fitness: Fitness) -> Iterator[Finding]:
    group, longer = fitness.accuracy, fitness.length.longer_is_right
    rule, side = max((longer, "longer"), (1 - longer, "shorter"))
    lead = group.accuracy - rule
    if group.pairs < MIN_COUNT or group.interval is None:
        there = f"{counted(group.pairs, 'pair')} of {counted(fitness.prompts, 'prompt')}"
        few = f"{there}; {MIN_COUNT} pairs are needed"
        yield ACCURACY.finds(None, group.accuracy, few)
        yield BEATS_LENGTH.finds(None, lead, few)
        return
    low, high = group.interval
    words = f"ranks {percent(group.accuracy)} of held-out pairs right"
    interval = f", interval {percent(low)} to {percent(high)}"
    yield ACCURACY.finds(low <= ACCURACY.threshold, group.accuracy, words + interval)
    words += f"; always taking the {side} response is right in {percent(rule)}"
    is_flagged = low <= rule + BEATS_LENGTH.threshold
    words += "; length alone may explain its accuracy" * is_flagged
    yield BEATS_LENGTH.finds(is_flagged, lead, words)


def of_length(fitness: Fitness) -> Iterator[Finding]:
    length, found = fitness.length, fitness.length.pairs
    counts = {group.label: group.pairs for group in length.groups}
    longer, shorter = counts.get(LONGER, 0), counts.get(SHORTER, 0)
    if length.gap is None or length.gap_interval is None or min(longer, shorter) < MIN_COUNT:
        words = f"chosen is longer in {longer} pairs and shorter in {shorter}; "
        words += f"{MIN_COUNT} of each are needed"
        yield LENGTH_GAP.finds(None, length.gap, words)
    else:
        low, high = length.gap_interval
        is_flagged = abs(length.gap) >= LENGTH_GAP.threshold and not low <= 0 <= high
        taste = "longer" if length.gap > 0 else "shorter"
        model, people = length.model_prefers_longer, length.people_prefer_longer
        assert model is not None and people is not None  # since there is a gap  # noqa: PT018
        words = (
            f"accuracy where chosen is longer less where it is shorter is {length.gap:+z.2f}, "
            f"interval {low:+z.2f} to {high:+z.2f}; the longer response scores higher in "
            f"{percent(model, 0)} of pairs, and was chosen in {percent(people, 0)}"
        ) + f"; it prefers the {taste} response" * is_flagged
        yield LENGTH_GAP.finds(is_flagged, length.gap, words)
    if found.points < MIN_COUNT:
        words = f"{counted(found.points, 'pair')}; {MIN_COUNT} are needed"
        yield LENGTH_CORRELATION.finds(None, found.pearson, words)
    elif found.pearson is None:
        words = "undefined: the differences of score or of length are all equal"
        yield LENGTH_CORRELATION.finds(None, None, words)
    else:
        words = f"difference of score and difference of length correlate by {found.pearson:+z.2f}"
        is_flagged = abs(found.pearson) >= LENGTH_CORRELATION.threshold
        yield LENGTH_CORRELATION.finds(is_flagged, found.pearson, words)


def of_confidence(fitness: Fitness) -> Finding:
    found, pairs = fitness.calibration, fitness.accuracy.pairs
    if found is None:
        words = "the source's scores are no log-odds, so that it states no confidence"
        return OVERCONFIDENCE.finds(None, None, words)
    if pairs < MIN_COUNT or found.overconfidence_interval is None:
        words = f"{counted(pairs, 'pair')}; {MIN_COUNT} are needed"
        return OVERCONFIDENCE.finds(None, found.ece, words)
    low, high = found.overconfidence_interval
    words = (
        f"ECE is {found.ece:.3f} (a calibrated model would show {found.ece_of_calibrated:.3f} by "
        f"chance); confidence less accuracy is {found.overconfidence:+z.3f}, interval "
        f"{low:+z.3f} to {high:+z.3f}"
    )
    is_flagged = found.ece >= OVERCONFIDENCE.threshold and low > 0
    return OVERCONFIDENCE.finds(is_flagged, found.ece, words)


def of_scale(fitness: Fitness) -> Finding:
    samples, pairs, outside = len(fitness.samples), len(fitness.pairs), fitness.outside
    if outside is None or min(samples, pairs) < MIN_COUNT:
        words = f"{counted(samples, 'SFT sample')} and {counted(pairs, 'pair')}; "
        return OUTSIDE.finds(None, outside, words + f"{MIN_COUNT} of each are needed")
    words = (
        f"{percent(outside)} of SFT samples score above or below every response of the "
        f"pairs ({percent(2 / (2 * pairs + 1))} would by chance)"
    )
    return OUTSIDE.finds(outside > OUTSIDE.threshold, outside, words)


def of_probe(probe: ProbeResult) -> Finding:
    subject = f"{PROBE.name} {probe.kind.replace('_', ' ')}"
    if probe.prompts < MIN_PROBES:
        words = f"{counted(probe.prompts, 'prompt')}; {MIN_PROBES} are needed"
        return PROBE.finds(None, probe.lead, words, subject)
    wins = probe.median > probe.chosen_median
    words = (
        f"{PROBES[probe.kind]}: median {probe.median:z.2f}, of good responses "
        f"{probe.chosen_median:z.2f}"
    )
    return PROBE.finds(wins, probe.lead, "a way the policy may cheat: " * wins + words, subject)


def find_in_pairs(problems: Problems) -> tuple[Finding, ...]:
    """Return the finding of every check of the pairs."""
    found = []
    shares = (problems.duplicates, problems.contradictions, problems.leaks)
    for check, problem in zip(PAIR_CHECKS, shares, strict=False):
        if problem is not None and problem.of < MIN_COUNT:
            words = f"{problem.of:,} {problem.unit}; {MIN_COUNT} are needed"
            found.append(check.finds(None, None, words))
        elif problem is not None:
            value = problem.count / problem.of
            found.append(check.finds(value >= check.threshold, value, problem.line))
    length = problems.length
    differ, share = length.longer + length.shorter, length.share
    if share is None or differ < MIN_COUNT:
        words = f"{counted(differ, 'pair')} of different lengths; {MIN_COUNT} are needed"
        return (*found, ONE_SIDED.finds(None, None, words))
    return (*found, ONE_SIDED.finds(length.one_sided, max(share, 1 - share), length.line))


Standing = Literal["unknown", "unfit", "flagged", "clear"]
CONCLUSIONS: dict[Standing, tuple[str, str]] = {
    "unknown": (
        f"Not enough data: {MIN_COUNT} held-out pairs, of at least two prompts, are needed to say "
        "if it beats guessing.",
        "It may run, but nothing says that what it is paid is what people chose: hold out more "
        "pairs, of more prompts, and measure again.",
    ),
    "unfit": (
        "Not fit: on held-out pairs it is not surely better than guessing.",
        "Do not run it on this reward: it would maximise what is not surely better than guessing.",
    ),
    "flagged": (
        "Fit with reservations: PPO will look for the weak spots below.",
        "It may run, with an eye on the flags: {}.",
    ),
    "clear": (
        "No check found a fault in it.",
        "It may run. Read its samples all the same: a reward that rises while they get worse has "
        "found a weak spot that no check here looks for.",
    ),
}
"""Conclusion of the findings about a reward, and the consequence for PPO."""
LENGTH_IS_PAID = "watch `rollout/response_tokens`, since length may be what is paid"
LOOK_FOR = {
    BEATS_LENGTH: LENGTH_IS_PAID,
    LENGTH_GAP: LENGTH_IS_PAID,
    LENGTH_CORRELATION: LENGTH_IS_PAID,
    OVERCONFIDENCE: "trust its order more than its distances",
    OUTSIDE: "distrust the scores where PPO starts, which lie where nobody measured",
    PROBE: "look in the samples for what the flagged probes show",
}
"""Check -> advice that is given if it is flagged."""


def flagged(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that are flags."""
    return [finding for finding in findings if finding.outcome == "flag"]


def standing_of(findings: Sequence[Finding]) -> Standing:
    """Return what the findings about a reward come to; the first is that of ACCURACY."""
    outcomes: dict[Outcome, Standing] = {"not tested": "unknown", "flag": "unfit"}
    return outcomes.get(findings[0].outcome) or ("flagged" if flagged(findings) else "clear")


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
    found = standing_of(findings)
    return Verdict(found == "unfit", summary(CONCLUSIONS[found][0], findings), reasons)


def for_ppo(findings: Sequence[Finding], in_pairs: Sequence[Finding]) -> str:
    """Return the advice as a short paragraph.

    findings: about the reward; in_pairs: about the pairs, may be empty.
    """
    flags = {finding.check for finding in flagged(findings)}
    watched = dict.fromkeys(advice for check, advice in LOOK_FOR.items() if check in flags)
    words = CONCLUSIONS[standing_of(findings)][1].format("; ".join(watched))
    if named := [finding.subject for finding in flagged(in_pairs)]:
        words += f" The pairs are flagged ({', '.join(named)}): mend them and train again first."
    return words


def fitness_metrics(
    fitness: Fitness, probes: Sequence[ProbeResult], findings: Sequence[Finding]
) -> dict[str, float]:
    """Return the scalar measurements by the names they are logged under; undefined ones are left
    out."""
    length, calibration = fitness.length, fitness.calibration
    accuracies = {group.label: group.accuracy for group in length.groups}
    low, high = fitness.accuracy.interval or (None, None)
    found: dict[str, float | None] = {
        "accuracy": fitness.accuracy.accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "accuracy_chosen_longer": accuracies.get(LONGER),
        "accuracy_chosen_shorter": accuracies.get(SHORTER),
        "length_gap": length.gap,
        "length_pearson": length.responses.pearson,
        "length_pearson_within_pairs": length.pairs.pearson,
        "length_pearson_sft": length.samples.pearson,
        "sft_outside": fitness.outside,
        "pairs": float(len(fitness.pairs)),
        "flags": float(len(flagged(findings))),
    }
    for name in () if calibration is None else ("log_loss", "ece", "overconfidence"):
        found[name] = getattr(calibration, name)
    found |= {f"probe_{probe.kind}": probe.lead for probe in probes}
    return {f"fitness/{name}": value for name, value in found.items() if value is not None}
