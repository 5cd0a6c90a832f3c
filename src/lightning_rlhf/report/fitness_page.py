"""Fitness report of a reward: its checks, the verdict and advice that follow, and the files.

report.md and its figures are for people, fitness.json for programs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from lightning_rlhf.core.errors import counted, percent
from lightning_rlhf.data.problems import LONGER_SHARE, Problems
from lightning_rlhf.models.checkpoint import PAGE, Verdict
from lightning_rlhf.report.estimates import Interval, number_text
from lightning_rlhf.report.figures import draw_fitness, kinds_of
from lightning_rlhf.report.fitness import LONGER, SHORTER, Fitness, ProbeResult
from lightning_rlhf.report.run_page import TEMPLATES
from lightning_rlhf.report.tables import plain, table
from lightning_rlhf.rewards.format_check import PROBES

NUMBERS, PICTURES = "fitness.json", "report"
CHARACTERS = 200
"""Maximum length of a text that is shown as an example, in characters."""
MIN_COUNT, MIN_PROBES = 30, 5
"""Minimum number of pairs or samples to judge a share, whose standard error is then at most 0.09,
and of prompts to judge a median."""
LENGTH_IS_PAID = "watch `rollout/response_tokens`, since length may be what is paid"


@dataclass(frozen=True)
class FitnessCheck:
    """A check of a reward or of preference pairs."""

    name: str
    threshold: float
    """Value from which on the check is flagged."""
    reason: str
    """Reason for the threshold."""
    advice: str = ""
    """Advice for PPO if the check is flagged."""

    def finds(
        self, value: float | None, words: str, is_flagged: bool | None = None, subject: str = ""
    ) -> Finding:
        """Return the finding; is_flagged: None where there are too few data."""
        outcome: Outcome = "not tested" if is_flagged is None else "flag" if is_flagged else "clear"
        return Finding(self, subject or self.name, outcome, value, words)


Outcome = Literal["flag", "clear", "not tested"]


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
        "accuracy, else the accuracy cannot be distinguished from length", LENGTH_IS_PAID),
    FitnessCheck(
        "length gap", 0.2,
        "a model that is right in 75% of pairs would be right in 85% of one half and 65% of the "
        "other; the 95% interval must exclude 0 as well, so that chance alone is no flag",
        LENGTH_IS_PAID),
    FitnessCheck(
        "length within pairs", 0.5,
        "at 0.5 length explains a quarter (its square) of the variance of score differences in a "
        "pair", LENGTH_IS_PAID),
    FitnessCheck(
        "overconfidence", 0.1,
        "an ECE of 0.1 is ten points between confidence and accuracy; the 95% interval of "
        "confidence less accuracy must be above 0 as well, because an ECE of few pairs is never 0",
        "trust its order more than its distances"),
    FitnessCheck(
        "SFT samples off the scale", 0.05,
        "share of samples outside the scores of the pairs; of samples with the distribution of the "
        "n responses of the pairs 2 / (n + 1) are outside by chance, 3.3% for the fewest pairs "
        "tested", "distrust the scores where PPO starts, which lie where nobody measured"),
    FitnessCheck(
        "probe", 0.0,
        "the value is its median less that of good responses; a response that is worse than a good "
        "one should not score higher", "look in the samples for what the flagged probes show"),
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


def of_pairs(fitness: Fitness) -> Iterator[Finding]:
    """Yield the findings on accuracy and length."""
    group, length, found = fitness.accuracy, fitness.length, fitness.length.pairs
    rule, side = max((length.longer_is_right, "longer"), (1 - length.longer_is_right, "shorter"))
    lead = group.accuracy - rule
    if group.pairs < MIN_COUNT or group.interval is None:
        words = f"{counted(group.pairs, 'pair')} of {counted(fitness.prompts, 'prompt')}; "
        for check, value in ((ACCURACY, group.accuracy), (BEATS_LENGTH, lead)):
            yield check.finds(value, f"{words}{MIN_COUNT} pairs are needed")
    else:
        low, high = group.interval
        words = f"ranks {percent(group.accuracy)} of held-out pairs right"
        yield ACCURACY.finds(group.accuracy, f"{words}, interval {percent(low)} to {percent(high)}",
                             low <= ACCURACY.threshold)  # fmt: skip
        is_flagged = low <= rule + BEATS_LENGTH.threshold
        words += f"; always taking the {side} response is right in {percent(rule)}"
        words += "; length alone may explain its accuracy" * is_flagged
        yield BEATS_LENGTH.finds(lead, words, is_flagged)
    counts = {group.label: group.pairs for group in length.groups}
    longer, shorter = counts.get(LONGER, 0), counts.get(SHORTER, 0)
    if length.gap is None or length.gap_interval is None or min(longer, shorter) < MIN_COUNT:
        words = f"chosen is longer in {longer} pairs and shorter in {shorter}; "
        yield LENGTH_GAP.finds(length.gap, f"{words}{MIN_COUNT} of each are needed")
    else:
        low, high = length.gap_interval
        is_flagged = abs(length.gap) >= LENGTH_GAP.threshold and not low <= 0 <= high
        words = (
            f"accuracy where chosen is longer less where it is shorter is {length.gap:+z.2f}, "
            f"interval {low:+z.2f} to {high:+z.2f}; the longer response scores higher in "
            f"{percent(length.model_prefers_longer or 0, 0)} of pairs, and was chosen in "
            f"{percent(length.people_prefer_longer or 0, 0)}"
        )
        taste = "longer" if length.gap > 0 else "shorter"
        words += f"; it prefers the {taste} response" * is_flagged
        yield LENGTH_GAP.finds(length.gap, words, is_flagged)
    if found.points < MIN_COUNT:
        words = f"{counted(found.points, 'pair')}; {MIN_COUNT} are needed"
        yield LENGTH_CORRELATION.finds(found.pearson, words)
    elif found.pearson is None:
        words = "undefined: the differences of score or of length are all equal"
        yield LENGTH_CORRELATION.finds(None, words)
    else:
        words = f"difference of score and difference of length correlate by {found.pearson:+z.2f}"
        is_flagged = abs(found.pearson) >= LENGTH_CORRELATION.threshold
        yield LENGTH_CORRELATION.finds(found.pearson, words, is_flagged)


def of_scores(fitness: Fitness) -> Iterator[Finding]:
    """Yield the findings on calibration and on the scores where PPO starts."""
    found, pairs = fitness.calibration, len(fitness.pairs)
    if found is None:
        words = "the source's scores are no log-odds, so that it states no confidence"
        yield OVERCONFIDENCE.finds(None, words)
    elif pairs < MIN_COUNT or found.overconfidence_interval is None:
        yield OVERCONFIDENCE.finds(found.ece, f"{counted(pairs, 'pair')}; {MIN_COUNT} are needed")
    else:
        low, high = found.overconfidence_interval
        chance = f"a calibrated model would show {found.ece_of_calibrated:.3f} by chance"
        words = f"ECE is {found.ece:.3f} ({chance}); confidence less accuracy is "
        words += f"{found.overconfidence:+z.3f}, interval {low:+z.3f} to {high:+z.3f}"
        is_flagged = found.ece >= OVERCONFIDENCE.threshold and low > 0
        yield OVERCONFIDENCE.finds(found.ece, words, is_flagged)
    samples, outside = len(fitness.samples), fitness.outside
    if outside is None or min(samples, pairs) < MIN_COUNT:
        words = f"{counted(samples, 'SFT sample')} and {counted(pairs, 'pair')}; "
        yield OUTSIDE.finds(outside, f"{words}{MIN_COUNT} of each are needed")
    else:
        words = f"{percent(outside)} of SFT samples score above or below every response of the "
        words += f"pairs ({percent(2 / (2 * pairs + 1))} would by chance)"
        yield OUTSIDE.finds(outside, words, outside > OUTSIDE.threshold)


def of_probe(probe: ProbeResult) -> Finding:
    """Return the finding on one kind of probe."""
    subject = f"{PROBE.name} {probe.kind.replace('_', ' ')}"
    if probe.prompts < MIN_PROBES:
        words = f"{counted(probe.prompts, 'prompt')}; {MIN_PROBES} are needed"
        return PROBE.finds(probe.lead, words, subject=subject)
    wins, words = probe.median > probe.chosen_median, f"{PROBES[probe.kind]}: median "
    words += f"{probe.median:z.2f}, of good responses {probe.chosen_median:z.2f}"
    return PROBE.finds(probe.lead, "a way the policy may cheat: " * wins + words, wins, subject)


def find_in_pairs(problems: Problems) -> Iterator[Finding]:
    """Yield the finding of every check of the pairs."""
    for check, name in zip(PAIR_CHECKS, ("duplicates", "contradictions", "leaks"), strict=False):
        problem = problems.counted.get(name)
        if problem is not None and problem.of < MIN_COUNT:
            yield check.finds(None, f"{problem.of:,} {problem.unit}; {MIN_COUNT} are needed")
        elif problem is not None:
            value = problem.count / problem.of
            yield check.finds(value, problem.line, value >= check.threshold)
    length = problems.length
    differ, share = length.longer + length.shorter, length.share
    if share is None or differ < MIN_COUNT:
        words = f"{counted(differ, 'pair')} of different lengths; {MIN_COUNT} are needed"
        yield ONE_SIDED.finds(None, words)
    else:
        yield ONE_SIDED.finds(max(share, 1 - share), length.line, length.one_sided)


CONCLUSIONS = {
    "not tested": (
        f"Not enough data: {MIN_COUNT} held-out pairs, of at least two prompts, are needed to say "
        "if it beats guessing.",
        "It may run, but nothing says that what it is paid is what people chose: hold out more "
        "pairs, of more prompts, and measure again."),
    "flag": (
        "Not fit: on held-out pairs it is not surely better than guessing.",
        "Do not run it on this reward: it would maximise what is not surely better than guessing."),
    "flagged": (
        "Fit with reservations: PPO will look for the weak spots below.",
        "It may run, with an eye on the flags: {}."),
    "clear": (
        "No check found a fault in it.",
        "It may run. Read its samples all the same: a reward that rises while they get worse has "
        "found a weak spot that no check here looks for."),
}  # fmt: skip
"""Outcome of ACCURACY, or "flagged" where only others are -> conclusion and consequence for PPO."""


def summary(words: str, findings: Sequence[Finding]) -> str:
    """Return the words and how many of the checks are flagged and not tested."""
    flags = [finding.subject for finding in findings if finding.outcome == "flag"]
    names = f" ({', '.join(flags)})" if flags else ""
    untold = sum(finding.outcome == "not tested" for finding in findings)
    return f"{words} {len(flags)} of {len(findings)} checks flagged{names}, {untold} not tested."


@dataclass(frozen=True, kw_only=True)
class FitnessReport:
    """Measurements of a reward, what they come to, and the files in which they are written."""

    title: str
    fitness: Fitness
    probes: Sequence[ProbeResult]
    problems: Problems | None
    """Problems of the preference data; None if they were not examined."""
    sampled_from: str
    """Phrase that says which prompts the SFT model answered."""
    scale: str
    """Sentence that says how the scores relate to what PPO maximises."""

    @cached_property
    def findings(self) -> Sequence[Finding]:
        """Return the finding of every check of the reward; none is flagged on too few data."""
        fitness = self.fitness
        return (*of_pairs(fitness), *of_scores(fitness), *map(of_probe, self.probes))

    @cached_property
    def flags(self) -> Sequence[Finding]:
        return [finding for finding in self.findings if finding.outcome == "flag"]

    @cached_property
    def in_pairs(self) -> Sequence[Finding]:
        return () if self.problems is None else tuple(find_in_pairs(self.problems))

    @property
    def metrics(self) -> dict[str, float]:
        """Return the scalar measurements by the names they are logged under."""
        probes = {f"fitness/probe_{probe.kind}": probe.lead for probe in self.probes}
        return self.fitness.metrics | {"fitness/flags": float(len(self.flags))} | probes

    @property
    def standing(self) -> str:
        """Return the key of the conclusion about the reward."""
        outcome = self.findings[0].outcome  # that of ACCURACY
        return "flagged" if outcome == "clear" and self.flags else outcome

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on the reward, in two sentences."""
        reasons = tuple(f"{finding.subject}: {finding.words}" for finding in self.flags)
        words = summary(CONCLUSIONS[self.standing][0], self.findings)
        return Verdict(self.standing == "flag", words, reasons)

    @property
    def advice(self) -> str:
        """Return what the findings mean for PPO, as a short paragraph."""
        watched = dict.fromkeys(one.check.advice for one in self.flags if one.check.advice)
        words = CONCLUSIONS[self.standing][1].format("; ".join(watched))
        if named := ", ".join(one.subject for one in self.in_pairs if one.outcome == "flag"):
            words += f" The pairs are flagged ({named}): mend them and train again first."
        return words

    @property
    def words(self) -> list[str]:
        """Return the verdict on the reward and, if examined, on the pairs: two sentences each."""
        if self.problems is None:
            return [self.verdict.words]
        outcomes, words = {one.outcome for one in self.in_pairs}, "No check found a fault in them."
        if "flag" in outcomes:
            words = "Some are flawed: what is trained or measured on them says less than it seems."
        elif outcomes == {"not tested"}:
            words = "Too few to be judged."
        return [self.verdict.words, f"About the pairs: {summary(words, self.in_pairs)}"]

    def write(self, folder: Path) -> dict[str, Path]:
        """Write report.md, fitness.json and the figures, in `report/`, into an existing folder.

        Returns the file of each figure by caption.
        """
        pictures = draw_fitness(folder / PICTURES, self.title, self.fitness)
        links = (f"![{x}]({PICTURES}/{file.name})" for x, file in pictures.items())
        words, problems, probes = self.words, self.problems, self.probes
        findings = (*self.findings, *self.in_pairs)
        text = (TEMPLATES / "fitness.md").read_text(encoding="utf-8").format(
            title=plain(self.title, CHARACTERS),
            conclusions="\n\n".join(f"**{plain(some, 10 * CHARACTERS)}**" for some in words),
            advice=self.advice, sampled_from=self.sampled_from, scale=self.scale,
            numbers="\n\n".join(_numbers(self.fitness)),
            pictures="\n\n".join(links),
            checks=table(("check", "outcome", "measured", "threshold", "in words"), [
                (f.subject, f"**{f.outcome}**" if f.outcome == "flag" else f.outcome,
                 number_text(f.value), f"{f.check.threshold:g}", plain(f.words, 10 * CHARACTERS))
                for f in findings
            ], right=(2, 3)),
            thresholds="\n".join(f"- **{check.name}**, {check.threshold:g}: {check.reason}."
                                 for check in (*CHECKS, *PAIR_CHECKS)),
            probes=_probes(probes) if probes else "None was scored.",
            data="Not looked through." if problems is None else "\n".join([
                *("\n  - ".join([f"- {one.line}", *(plain(x, CHARACTERS) for x in one.examples)])
                  for one in problems.counted.values()),
                f"- {problems.length.line}",
            ]),
            min_count=MIN_COUNT, min_probes=MIN_PROBES,
        )  # fmt: skip
        (folder / PAGE).write_text(text, encoding="utf-8")
        measured, pairs = asdict(self.fitness), None if problems is None else asdict(problems)
        del measured["pairs"], measured["samples"]
        content = {
            "metrics": self.metrics,
            "fitness": measured,
            "findings": list(map(asdict, findings)),
            "probes": [asdict(probe) | {"wins": probe.lead > 0} for probe in probes],
            "problems": None if pairs is None else pairs["counted"] | {"length": pairs["length"]},
            "judgement": asdict(self.verdict),
            "title": self.title,
            "verdict": words[0],
            "about_pairs": None if problems is None else words[1],
        }
        numbers = json.dumps(content, indent=1, allow_nan=False)
        (folder / NUMBERS).write_text(f"{numbers}\n", encoding="utf-8")
        return pictures


def read_judgement(folder: Path) -> Verdict | None:
    """Return the verdict of the report that was written into `folder`; None without one."""
    file = folder / NUMBERS
    return Verdict(**json.loads(file.read_bytes())["judgement"]) if file.is_file() else None


def _numbers(fitness: Fitness) -> Iterator[str]:
    """Yield the paragraph and the tables of the section of numbers."""
    length, calibration, accuracy = fitness.length, fitness.calibration, fitness.accuracy
    pairs, samples = len(fitness.pairs), len(fitness.samples)
    on = f"{counted(pairs, 'held-out pair')} of {counted(fitness.prompts, 'prompt')}"
    yield f"Measured on {on} and {counted(samples, 'SFT sample')}; {counted(fitness.ties, 'tie')}."
    groups = [("Accuracy", accuracy), *((f"Accuracy, {g.label}", g) for g in length.groups)]
    groups += [(f"Accuracy, score difference {g.label}", g) for g in fitness.by_difference]
    groups += [(f"Accuracy, given margin {g.label}", g) for g in fitness.by_margin]

    def text(interval: Interval | None) -> str:
        return "-" if interval is None else f"{interval[0]:z.3f} to {interval[1]:z.3f}"

    rows: list[tuple[str, float | None, str]] = [
        *((f"{name} ({counted(g.pairs, 'pair')})", g.accuracy, text(g.interval))
          for name, g in groups),
        ("Accuracy of always taking the longer response", length.longer_is_right, ""),
        ("Length gap", length.gap, text(length.gap_interval)),
    ]  # fmt: skip
    if calibration is not None:
        rows += [
            ("Log-loss, nats a pair", calibration.log_loss, ""),
            ("ECE", calibration.ece, ""),
            ("ECE of a calibrated model, by chance", calibration.ece_of_calibrated, ""),
            ("Overconfidence", calibration.overconfidence,
             text(calibration.overconfidence_interval)),
        ]  # fmt: skip
    cells = [(name, number_text(value), ends) for name, value, ends in rows]
    yield table(("", "value", "95% interval"), cells, right=(1, 2))
    if accuracy.accuracy == 1 and fitness.prompts > 1:
        most = percent(min(1.0, 3 / fitness.prompts))
        words = "Every pair is ranked right, so that a bootstrap has nothing to vary; by the rule"
        yield f"{words} of three up to {most} of such pairs may still be ranked wrong (95%)."
    yield table(("Correlation", "points", "Pearson", "Spearman"), [
        (name, f"{found.points:,}",
         *("undefined" if r is None else f"{r:+z.3f}" for r in (found.pearson, found.spearman)))
        for name, found in (
            ("Score with length, responses of the pairs", length.responses),
            ("Differences of score and length, within pairs", length.pairs),
            ("Score with length, SFT samples", length.samples),
        )
    ], right=(1, 2, 3))  # fmt: skip
    yield table(("Score", "responses", "mean", "std", "lowest", "median", "highest"), [
        (name, f"{found.count:,}",
         *map(number_text, (found.mean, found.std, found.lowest, found.median, found.highest)))
        for name, _, found in kinds_of(fitness)
    ], right=range(1, 7))  # fmt: skip


def _probes(probes: Sequence[ProbeResult]) -> str:
    heading = ("probe", "prompts", "mean", "median", "median of chosen", "median of rejected",
               "beats chosen")  # fmt: skip
    rows, examples = [], []
    for p in probes:
        name, middle, shown = p.kind.replace("_", " "), number_text(p.median), p.example
        rows.append((
            f"{name}: {PROBES[p.kind]}", f"{p.prompts:,}", number_text(p.mean),
            f"**{middle}**" if p.lead > 0 else middle, number_text(p.chosen_median),
            number_text(p.rejected_median), percent(p.beats_chosen, 0),
        ))  # fmt: skip
        examples.append((
            name, plain(shown.pair.prompt, CHARACTERS), plain(shown.response, CHARACTERS),
            number_text(shown.score), number_text(shown.pair.chosen_score),
        ))  # fmt: skip
    columns = ("probe", "prompt", "response", "score", "score of chosen")
    return (
        f"{table(heading, rows, right=range(1, 7))}\n\nOne example of each, the one whose score is "
        f"nearest to the median:\n\n{table(columns, examples, right=(3, 4))}"
    )
