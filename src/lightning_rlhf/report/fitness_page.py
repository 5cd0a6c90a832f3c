"""Fitness report of a reward: its checks, the verdict and advice that follow, and the files.

report.md and its figures are for people, fitness.json for programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_rlhf.core.errors import counted, percent
from lightning_rlhf.data.problems import LONGER_SHARE, Problems
from lightning_rlhf.models.checkpoint import PAGE, Verdict
from lightning_rlhf.report import figures, run_page
from lightning_rlhf.report.estimates import MOMENTS, number_text
from lightning_rlhf.report.fitness import LONGER, SHORTER, Fitness, Numbers
from lightning_rlhf.report.tables import plain, table
from lightning_rlhf.rewards.format_check import PROBES

NUMBERS, PICTURE = "fitness.json", "report/rewards.png"
SCORES = "Scores of chosen and rejected responses and of SFT samples"
"""Caption of the picture."""
CHARACTERS = 200
"""Maximum length of a text that is shown as an example, in characters."""
MIN_COUNT, MIN_PROBES = 30, 5
"""Minimum number of pairs or samples to judge a share, whose standard error is then at most 0.09,
and of prompts to judge a median."""
LENGTH_IS_REWARDED = "watch `rollout/response_tokens`, since length may be what is rewarded"


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


def checks_of(text: str) -> tuple[FitnessCheck, ...]:
    """Return the checks of a table: name, threshold, reason and, if any, advice."""
    found = []
    for row in re.split(r"\n(?=\S)", text.strip()):
        head, _, rest = " ".join(row.split()).partition(": ")
        (name, threshold), (reason, _, advice) = head.split(" | "), rest.partition(" -> ")
        found.append(FitnessCheck(name, float(threshold), reason, advice))
    return tuple(found)


CHECKS = checks_of(f"""
better than guessing | 0.5: guessing ranks half of the pairs right; the whole 95% interval must be
    above it
better than length | 0: the value is the accuracy less that of always choosing the longer response,
    or the shorter if that is right more often; the whole 95% interval must be above that rule's
    accuracy, else the accuracy cannot be distinguished from length -> {LENGTH_IS_REWARDED}
length gap | 0.2: a model that is right in 75% of pairs would be right in 85% of one half and 65% of
    the other; the 95% interval must exclude 0 as well, so that chance alone is no flag ->
    {LENGTH_IS_REWARDED}
length within pairs | 0.5: at 0.5 length explains a quarter (its square) of the variance of score
    differences in a pair -> {LENGTH_IS_REWARDED}
overconfidence | 0.1: an ECE of 0.1 is ten points between confidence and accuracy; the 95% interval
    of confidence less accuracy must be above 0 as well, because an ECE of few pairs is never 0 ->
    trust its order more than its distances
SFT samples off the scale | 0.05: share of samples outside the scores of the pairs; of samples with
    the distribution of the n responses of the pairs 2 / (n + 1) are outside by chance, 3.3% for the
    fewest pairs tested -> distrust the scores where PPO starts, which lie where nobody measured
probe | 0: the value is its median less that of good responses; a response that is worse than a good
    one should not score higher -> look in the samples for what the flagged probes show
""")
"""Checks of a reward."""
ACCURACY, BEATS_LENGTH, LENGTH_GAP, LENGTH_CORRELATION, OVERCONFIDENCE, OUTSIDE, PROBE = CHECKS
PAIR_CHECKS = checks_of(f"""
duplicate pairs | 0.05: share of all pairs; a duplicate counts twice in training and in an interval,
    and one pair in twenty is more than chance
contradicting pairs | 0.02: share of all pairs; one of two contradicting pairs is always ranked
    wrong, so at 0.02 the best accuracy is two points below 1
held-out prompts trained on | 0.05: share of held-out prompts; the accuracy on them may come from
    memory, and at 0.05 it may be five points too high
one-sided length | {LONGER_SHARE}: share of the pairs of different lengths in which one side is
    longer; beyond it length alone predicts the label usefully; the 95% interval must exclude 1/2 as
    well
""")
"""Checks of the pairs, which need no scores."""
*_, ONE_SIDED = PAIR_CHECKS


def of_pairs(fitness: Fitness) -> Iterator[Finding]:
    """Yield the findings on accuracy and length; none is flagged on too few data."""
    group, length = fitness.accuracy, fitness.length
    pairs = counted(group.pairs, "pair")
    rule = length["longer_is_right"]
    rule, side = max((rule, "longer"), (1 - rule, "shorter"))
    lead = group.accuracy - rule
    if group.pairs < MIN_COUNT or group.interval is None:
        words = f"{pairs} of {counted(fitness.prompts, 'prompt')}; {MIN_COUNT} pairs are needed"
        yield ACCURACY.finds(group.accuracy, words)
        yield BEATS_LENGTH.finds(lead, words)
    else:
        low, high = group.interval
        words = f"ranks {percent(group.accuracy)} of held-out pairs right"
        ends = f"interval {percent(low)} to {percent(high)}"
        yield ACCURACY.finds(group.accuracy, f"{words}, {ends}", low <= ACCURACY.threshold)
        is_flagged = low <= rule + BEATS_LENGTH.threshold
        words += f"; always taking the {side} response is right in {percent(rule)}"
        words += "; length alone may explain its accuracy" * is_flagged
        yield BEATS_LENGTH.finds(lead, words, is_flagged)
    gap, counts = length["gap"], {one.label: one.pairs for one in length["groups"]}
    longer, shorter = counts.get(LONGER, 0), counts.get(SHORTER, 0)
    if length["gap_interval"] is None or min(longer, shorter) < MIN_COUNT:
        words = f"chosen is longer in {longer} pairs and shorter in {shorter}; "
        yield LENGTH_GAP.finds(gap, f"{words}{MIN_COUNT} of each are needed")
    else:
        low, high = length["gap_interval"]
        is_flagged = abs(gap) >= LENGTH_GAP.threshold and not low <= 0 <= high
        words = (
            f"accuracy where chosen is longer less where it is shorter is {gap:+z.2f}, interval "
            f"{low:+z.2f} to {high:+z.2f}; the longer response scores higher in "
            f"{percent(length['model_prefers_longer'], 0)} of pairs, and was chosen in "
            f"{percent(length['people_prefer_longer'], 0)}"
        )
        words += f"; it prefers the {'longer' if gap > 0 else 'shorter'} response" * is_flagged
        yield LENGTH_GAP.finds(gap, words, is_flagged)
    pearson = length["pairs"]["pearson"]
    if group.pairs < MIN_COUNT:
        yield LENGTH_CORRELATION.finds(pearson, f"{pairs}; {MIN_COUNT} are needed")
    elif pearson is None:
        words = "undefined: the differences of score or of length are all equal"
        yield LENGTH_CORRELATION.finds(None, words)
    else:
        words = f"difference of score and difference of length correlate by {pearson:+z.2f}"
        yield LENGTH_CORRELATION.finds(pearson, words, abs(pearson) >= LENGTH_CORRELATION.threshold)


def of_scores(fitness: Fitness, probes: Sequence[Numbers]) -> Iterator[Finding]:
    """Yield the findings on calibration, on the scores where PPO starts, and on probes."""
    odds, outside, samples = fitness.calibration, fitness.outside, len(fitness.samples)
    count, pairs = len(fitness.pairs), counted(len(fitness.pairs), "pair")
    if odds is None:
        words = "the source's scores are no log-odds, so that it states no confidence"
        yield OVERCONFIDENCE.finds(None, words)
    elif count < MIN_COUNT or odds["overconfidence_interval"] is None:
        yield OVERCONFIDENCE.finds(odds["ece"], f"{pairs}; {MIN_COUNT} are needed")
    else:
        low, high = odds["overconfidence_interval"]
        words = (
            f"ECE is {odds['ece']:.3f} (a calibrated model would show "
            f"{odds['ece_of_calibrated']:.3f} by chance); confidence less accuracy is "
            f"{odds['overconfidence']:+z.3f}, interval {low:+z.3f} to {high:+z.3f}"
        )
        is_flagged = odds["ece"] >= OVERCONFIDENCE.threshold and low > 0
        yield OVERCONFIDENCE.finds(odds["ece"], words, is_flagged)
    if outside is None or min(samples, count) < MIN_COUNT:
        words = f"{counted(samples, 'SFT sample')} and {pairs}; {MIN_COUNT} of each are needed"
        yield OUTSIDE.finds(outside, words)
    else:
        words = f"{percent(outside)} of SFT samples score above or below every response of the "
        words += f"pairs ({percent(2 / (2 * count + 1))} would by chance)"
        yield OUTSIDE.finds(outside, words, outside > OUTSIDE.threshold)
    for probe in probes:
        subject, lead = f"{PROBE.name} {probe['kind'].replace('_', ' ')}", probe["lead"]
        words, is_flagged = f"{counted(probe['prompts'], 'prompt')}; {MIN_PROBES} are needed", None
        if probe["prompts"] >= MIN_PROBES:
            is_flagged = lead > PROBE.threshold
            words = "a way the policy may cheat: " * is_flagged + PROBES[probe["kind"]]
            words += f": median {probe['median']:z.2f}, of good responses "
            words += f"{probe['chosen_median']:z.2f}"
        yield PROBE.finds(lead, words, is_flagged, subject)


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
        "It may run, but nothing says that its reward is what people chose: hold out more "
        "pairs, of more prompts, and measure again."),
    "flag": (
        "Not fit: on held-out pairs it is not surely better than guessing.",
        "Do not run it on this reward: it would maximise what is not surely better than guessing."),
    "flagged": (
        "Fit with reservations: PPO will look for its weak spots.",
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
    untested = sum(finding.outcome == "not tested" for finding in findings)
    return f"{words} {len(flags)} of {len(findings)} checks flagged{names}, {untested} not tested."


@dataclass(kw_only=True)
class FitnessReport:
    """Measurements of a reward, what they come to, and the files in which they are written.

    findings, in_pairs: finding of every check of the reward, that of ACCURACY first, and of every
        check of the pairs; none is flagged on too few data.
    flags: findings of the reward that are flagged.
    metrics: scalar measurements by the names they are logged under.
    verdict, advice: verdict on the reward, and its meaning for PPO as a short paragraph.
    words: verdict on the reward and, if examined, on the pairs: two sentences each.
    """

    title: str
    fitness: Fitness
    probes: Sequence[Numbers]
    problems: Problems | None
    """Problems of the preference data; None if they were not examined."""
    sampled_from: str
    """Phrase that says which prompts the SFT model answered."""
    scale: str
    """Sentence that says how the scores relate to what PPO maximises."""

    def __post_init__(self) -> None:
        self.findings = [*of_pairs(self.fitness), *of_scores(self.fitness, self.probes)]
        self.in_pairs = [] if self.problems is None else [*find_in_pairs(self.problems)]
        self.flags = [one for one in self.findings if one.outcome == "flag"]
        leads = {f"fitness/probe_{probe['kind']}": probe["lead"] for probe in self.probes}
        self.metrics = {**self.fitness.metrics, "fitness/flags": float(len(self.flags)), **leads}
        outcome = self.findings[0].outcome
        result, advice = CONCLUSIONS["flagged" if outcome == "clear" and self.flags else outcome]
        reasons = tuple(f"{one.subject}: {one.words}" for one in self.flags)
        self.verdict = Verdict(outcome == "flag", summary(result, self.findings), reasons)
        watched = dict.fromkeys(one.check.advice for one in self.flags if one.check.advice)
        self.advice, self.words = advice.format("; ".join(watched)), [self.verdict.words]
        flawed = [one.subject for one in self.in_pairs if one.outcome == "flag"]
        result = "No check found a fault in them."
        if flawed:
            result = "Some are flawed: what is trained or measured on them says less than it seems."
            named = f"The pairs are flagged ({', '.join(flawed)})"
            self.advice += f" {named}: correct them and train again first."
        elif all(one.outcome == "not tested" for one in self.in_pairs):
            result = "Too few to be judged."
        if self.problems is not None:
            self.words.append(f"About the pairs: {summary(result, self.in_pairs)}")

    def write(self, folder: Path) -> None:
        """Write report.md, fitness.json and the picture of the scores into an existing folder."""
        figures.draw_fitness(folder / PICTURE, self.title, self.fitness)
        problems, findings = self.problems, [*self.findings, *self.in_pairs]
        checks, data = [], []
        for one in findings:
            outcome = f"**{one.outcome}**" if one.outcome == "flag" else one.outcome
            threshold, words = f"{one.check.threshold:g}", plain(one.words, 10 * CHARACTERS)
            checks.append((one.subject, outcome, number_text(one.value), threshold, words))
        for problem in () if problems is None else problems.counted.values():
            examples = (plain(example, CHARACTERS) for example in problem.examples)
            data.append("\n  - ".join([f"- {problem.line}", *examples]))
        data.append("Not looked through." if problems is None else f"- {problems.length.line}")
        thresholds = [f"- **{x.name}**, {x.threshold:g}: {x.reason}." for x in CHECKS + PAIR_CHECKS]
        template = (run_page.TEMPLATES / "fitness.md").read_text(encoding="utf-8")
        text = template.format(
            title=plain(self.title, CHARACTERS),
            conclusions="\n\n".join(f"**{plain(some, 10 * CHARACTERS)}**" for some in self.words),
            advice=self.advice,
            sampled_from=self.sampled_from,
            scale=self.scale,
            numbers="\n\n".join(_numbers(self.fitness)),
            picture=f"![{SCORES}]({PICTURE})",
            checks=table(("check", "outcome", "measured", "threshold", "in words"), checks, (2, 3)),
            thresholds="\n".join(thresholds),
            probes=_probes(self.probes) if self.probes else "None was scored.",
            data="\n".join(data),
            min_count=MIN_COUNT,
            min_probes=MIN_PROBES,
        )
        (folder / PAGE).write_text(text, encoding="utf-8")
        measured = {k: x for k, x in vars(self.fitness).items() if k not in ("pairs", "samples")}
        content = {
            "metrics": self.metrics,
            "fitness": measured,
            "findings": findings,
            "probes": [{**probe, "wins": probe["lead"] > 0} for probe in self.probes],
            "problems": problems and {"leaks": None, **problems.counted, "length": problems.length},
            "judgement": self.verdict,
            "title": self.title,
            "verdict": self.words[0],
            "about_pairs": None if problems is None else self.words[1],
        }
        text = json.dumps(content, indent=1, allow_nan=False, default=vars)
        (folder / NUMBERS).write_text(f"{text}\n", encoding="utf-8")


def read_judgement(folder: Path) -> Verdict | None:
    """Return the verdict of the report that was written into `folder`; None without one."""
    file = folder / NUMBERS
    return Verdict(**json.loads(file.read_bytes())["judgement"]) if file.is_file() else None


def _numbers(fitness: Fitness) -> Iterator[str]:
    """Yield the paragraph and the tables of the section of numbers."""
    length, odds, accuracy = fitness.length, fitness.calibration, fitness.accuracy
    on = f"{counted(accuracy.pairs, 'held-out pair')} of {counted(fitness.prompts, 'prompt')}"
    samples, ties = counted(len(fitness.samples), "SFT sample"), counted(fitness.ties, "tie")
    yield f"Measured on {on} and {samples}; {ties}."
    kinds = {
        ", ": length["groups"],
        ", score difference ": fitness.by_difference,
        ", given margin ": fitness.by_margin,
    }
    groups = [("", accuracy)]
    groups += [(kind + group.label, group) for kind, some in kinds.items() for group in some]
    rows: list[tuple[str, float | None, Sequence[float] | None]] = [
        (f"Accuracy{kind} ({counted(group.pairs, 'pair')})", group.accuracy, group.interval)
        for kind, group in groups
    ]
    rows.append(("Accuracy of always taking the longer response", length["longer_is_right"], ()))
    rows.append(("Length gap", length["gap"], length["gap_interval"]))
    if odds is not None:
        rows += [
            ("Log-loss, nats a pair", odds["log_loss"], ()),
            ("ECE", odds["ece"], ()),
            ("ECE of a calibrated model, by chance", odds["ece_of_calibrated"], ()),
            ("Overconfidence", odds["overconfidence"], odds["overconfidence_interval"]),
        ]
    cells = [
        (name, number_text(value), "-" if ends is None else " to ".join(map(number_text, ends)))
        for name, value, ends in rows
    ]
    yield table(("", "value", "95% interval"), cells, right=(1, 2))
    if accuracy.accuracy == 1 and fitness.prompts > 1:
        most = percent(min(1.0, 3 / fitness.prompts))
        words = "Every pair is ranked right, so that a bootstrap has nothing to vary; by the rule"
        yield f"{words} of three up to {most} of such pairs may still be ranked wrong (95%)."
    correlations = []
    for name, of in (
        ("Score with length, responses of the pairs", "responses"),
        ("Differences of score and length, within pairs", "pairs"),
        ("Score with length, SFT samples", "samples"),
    ):
        points, *found = length[of].values()
        signed = ("undefined" if r is None else f"{r:+z.3f}" for r in found)
        correlations.append((name, f"{points:,}", *signed))
    yield table(("Correlation", "points", "Pearson", "Spearman"), correlations, right=(1, 2, 3))
    scores = [
        (kind, f"{found['count']:,}", *(number_text(found[name]) for name in MOMENTS))
        for kind, found in fitness.kinds.items()
    ]
    yield table(("Score", "responses", *MOMENTS), scores, right=range(1, 7))


def _probes(probes: Sequence[Numbers]) -> str:
    rows, examples = [], []
    for probe in probes:
        name, shown = probe["kind"].replace("_", " "), probe["example"]
        keys = ("mean", "median", "chosen_median", "rejected_median")
        mean, middle, good, bad = (number_text(probe[key]) for key in keys)
        middle = f"**{middle}**" if probe["lead"] > 0 else middle
        title, count = f"{name}: {PROBES[probe['kind']]}", f"{probe['prompts']:,}"
        rows.append((title, count, mean, middle, good, bad, percent(probe["beats_chosen"], 0)))
        texts = (plain(text, CHARACTERS) for text in (shown.pair.prompt, shown.response))
        examples.append((name, *texts, *map(number_text, (shown.score, shown.pair.chosen_score))))
    middles = ("mean", "median", "median of chosen", "median of rejected")
    columns = ("probe", "prompts", *middles, "beats chosen")
    of_examples = ("probe", "prompt", "response", "score", "score of chosen")
    return (
        f"{table(columns, rows, right=range(1, 7))}\n\nOne example of each, the one whose score is "
        f"nearest to the median:\n\n{table(of_examples, examples, right=(3, 4))}"
    )
