"""Fitness report of a reward: report.md for people, fitness.json for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_rlhf.core.wording import counted, percent
from lightning_rlhf.data.problems import Problems
from lightning_rlhf.models.verdict import PAGE, Verdict
from lightning_rlhf.report.checks import CHECKS, PAIR_CHECKS, Finding
from lightning_rlhf.report.estimates import Correlation, Group, Interval
from lightning_rlhf.report.findings import about_pairs, find, find_in_pairs, judgement
from lightning_rlhf.report.fitness import Fitness
from lightning_rlhf.report.fitness_figures import draw_fitness
from lightning_rlhf.report.glossary import GLOSSARY, metrics
from lightning_rlhf.report.markdown import plain, table
from lightning_rlhf.report.probing import ProbeResult
from lightning_rlhf.report.reward_advice import for_ppo
from lightning_rlhf.rewards.probes import PROBES

NUMBERS, PICTURES = "fitness.json", "report"
CHARACTERS = 200
"""Maximum length of a text that is shown as an example, in characters."""


@dataclass(frozen=True)
class Written:
    """Files and conclusions of a report."""

    page: Path
    numbers: Path
    pictures: Mapping[str, Path]
    """File of each figure, by caption."""
    findings: tuple[Finding, ...]
    """Findings about the reward."""
    judgement: Verdict
    """Verdict on the reward."""
    about_pairs: str | None
    """Summary of the findings about the pairs; None if the pairs were not examined."""

    @property
    def verdict(self) -> str:
        """Return the verdict in two sentences."""
        return self.judgement.words


def write_fitness(
    folder: Path,
    *,
    title: str,
    fitness: Fitness,
    probes: Sequence[ProbeResult],
    problems: Problems | None,
    sampled_from: str,
    scale: str,
) -> Written:
    """Write report.md, fitness.json and the figures, in `report/`, into `folder`.

    Args:
        folder: output folder, made if it is missing.
        title: name of what was measured, as plain text.
        fitness: measurements to report.
        probes: results of the probes; may be empty.
        problems: problems of the preference data; None if they were not examined.
        sampled_from: phrase that says which prompts the SFT model answered.
        scale: sentence that says how the scores relate to what PPO maximises.
    """
    findings = find(fitness, probes)
    in_pairs = () if problems is None else find_in_pairs(problems)
    pairs = None if problems is None else about_pairs(in_pairs)
    pictures = draw_fitness(folder / PICTURES, title, fitness, probes)
    judged = judgement(findings)
    sections = [
        f"# Is this reward fit to be maximised? {plain(title, CHARACTERS)}",
        f"**{plain(judged.words, 10 * CHARACTERS)}**",
        *([] if pairs is None else [f"**{plain(pairs, 10 * CHARACTERS)}**"]),
        "## What this means for PPO",
        for_ppo(findings, in_pairs),
        f"Good responses are the chosen ones of held-out pairs, and their score is the median. SFT "
        f"samples are what the SFT model, where PPO starts, says to {sampled_from}. {scale}",
        "## Numbers",
        *_numbers(fitness),
        "## Pictures",
        *(f"![{what}]({path.relative_to(folder).as_posix()})" for what, path in pictures.items()),
        *_checks((*findings, *in_pairs)),
        *_probes(probes),
        *_data(problems),
        "## How each number is defined",
        "\n".join(f"- **{name}**: {meaning}" for name, meaning in GLOSSARY.items()),
    ]
    page, numbers = folder / PAGE, folder / NUMBERS
    page.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    labels = {
        "judgement": asdict(judged),
        "title": title,
        "verdict": judged.words,
        "about_pairs": pairs,
    }
    content = as_json(fitness, (*findings, *in_pairs), probes, problems) | labels
    numbers.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return Written(page, numbers, pictures, findings, judged, pairs)


def read_judgement(folder: Path) -> Verdict | None:
    """Return the verdict of the report that `write_fitness` left in `folder`; None without one."""
    numbers = folder / NUMBERS
    if not numbers.is_file():
        return None
    return Verdict(**json.loads(numbers.read_text(encoding="utf-8"))["judgement"])


def as_json(
    fitness: Fitness,
    findings: Sequence[Finding],
    probes: Sequence[ProbeResult],
    problems: Problems | None,
) -> dict[str, Any]:
    """Return all measurements as a JSON object, without the pairs and samples they come from."""
    measured = asdict(fitness)
    del measured["pairs"], measured["samples"]
    return {
        "metrics": metrics(fitness, probes, [f for f in findings if f.check in CHECKS]),
        "fitness": measured,
        "findings": [asdict(finding) for finding in findings],
        "probes": [asdict(probe) | {"wins": probe.wins} for probe in probes],
        "problems": None if problems is None else asdict(problems),
    }


def _numbers(fitness: Fitness) -> Iterator[str]:
    counts = [
        counted(len(fitness.pairs), "held-out pair"),
        counted(fitness.prompts, "prompt"),
        counted(len(fitness.samples), "SFT sample"),
        counted(fitness.ties, "tie"),
    ]
    yield "Measured on {} of {} and {}; {}.".format(*counts)
    rows = [_group_row("Accuracy", fitness.accuracy)]
    rows += [_group_row(f"Accuracy, {group.label}", group) for group in fitness.length.groups]
    rows += [
        _group_row(f"Accuracy, {by} {group.label}", group)
        for by, groups in (
            ("score difference", fitness.by_difference), ("given margin", fitness.by_margin)
        )
        for group in groups
    ]  # fmt: skip
    length, calibration = fitness.length, fitness.calibration
    rows.append(
        ("Accuracy of always taking the longer response", number(length.longer_is_right), "")
    )
    rows.append(("Length gap", number(length.gap), interval(length.gap_interval)))
    if calibration is not None:
        low_high = interval(calibration.overconfidence_interval)
        rows += [
            ("Log-loss, nats a pair", number(calibration.log_loss), ""),
            ("ECE", number(calibration.ece), ""),
            ("ECE of a calibrated model, by chance", number(calibration.ece_of_calibrated), ""),
            ("Overconfidence", number(calibration.overconfidence), low_high),
        ]
    yield table(("", "value", "95% interval"), rows, right=(1, 2))
    if fitness.accuracy.accuracy == 1 and fitness.prompts > 1:
        most = min(1.0, 3 / fitness.prompts)
        yield (
            "Every pair is ranked right, so that a bootstrap has nothing to vary; by the rule of "
            f"three up to {percent(most)} of such pairs may still be ranked wrong (95%)."
        )
    correlations = [
        _correlation_row("Score with length, responses of the pairs", length.responses),
        _correlation_row("Differences of score and length, within pairs", length.pairs),
        _correlation_row("Score with length, SFT samples", length.samples),
    ]
    yield table(("Correlation", "points", "Pearson", "Spearman"), correlations, right=(1, 2, 3))
    kinds = {
        "chosen": fitness.chosen, "rejected": fitness.rejected, "SFT samples": fitness.sampled
    }  # fmt: skip
    moments = [
        (name, f"{found.count:,}", *map(number, (found.mean, found.std, found.lowest,
                                                 found.median, found.highest)))
        for name, found in kinds.items() if found is not None
    ]  # fmt: skip
    heading = ("Score", "responses", "mean", "std", "lowest", "median", "highest")
    yield table(heading, moments, right=range(1, 7))


def _checks(findings: Sequence[Finding]) -> Iterator[str]:
    yield "## Checks"
    rows = (
        (f.subject, f"**{f.outcome}**" if f.outcome == "flag" else f.outcome,
         number(f.value), f"{f.check.threshold:g}", plain(f.words, 10 * CHARACTERS))
        for f in findings
    )  # fmt: skip
    yield table(("check", "outcome", "measured", "threshold", "in words"), rows, right=(2, 3))
    yield "Why these thresholds:"
    yield "\n".join(f"- **{check.name}**, {check.threshold:g}: {check.reason}."
                    for check in (*CHECKS, *PAIR_CHECKS))  # fmt: skip


def _probes(probes: Sequence[ProbeResult]) -> Iterator[str]:
    yield "## Probes"
    if not probes:
        yield "None was scored."
        return
    heading = ("probe", "prompts", "mean", "median", "median of chosen", "median of rejected",
               "beats chosen")  # fmt: skip
    rows = (
        (f"{p.kind.replace('_', ' ')}: {PROBES[p.kind]}", f"{p.prompts:,}", number(p.mean),
         f"**{number(p.median)}**" if p.wins else number(p.median), number(p.chosen_median),
         number(p.rejected_median), percent(p.beats_chosen, 0))
        for p in probes
    )  # fmt: skip
    yield table(heading, rows, right=range(1, 7))
    yield "One example of each, the one whose score is nearest to the median:"
    examples = (
        (p.kind.replace("_", " "), plain(p.example.pair.prompt, CHARACTERS),
         plain(p.example.response, CHARACTERS), number(p.example.score),
         number(p.example.pair.chosen_score))
        for p in probes
    )  # fmt: skip
    yield table(("probe", "prompt", "response", "score", "score of chosen"), examples, right=(3, 4))


def _data(problems: Problems | None) -> Iterator[str]:
    yield "## Preference data"
    if problems is None:
        yield "Not looked through."
        return
    items = []
    for problem in problems.counted:
        items.append(f"- {problem.line}")
        items += [f"  - {plain(example, CHARACTERS)}" for example in problem.examples]
    yield "\n".join([*items, f"- {problems.length.line}"])


def _group_row(name: str, group: Group) -> tuple[str, str, str]:
    pairs = counted(group.pairs, "pair")
    return f"{name} ({pairs})", number(group.accuracy), interval(group.interval)


def _correlation_row(name: str, found: Correlation) -> tuple[str, str, str, str]:
    undefined = "undefined"
    pearson, spearman = (
        undefined if r is None else f"{r:+z.3f}" for r in (found.pearson, found.spearman)
    )
    return name, f"{found.points:,}", pearson, spearman


def number(value: float | None) -> str:
    """Return the number as text with three decimals, or a dash for None."""
    return "-" if value is None else f"{value:z.3f}"


def interval(ends: Interval | None) -> str:
    """Return both ends as text with three decimals, or a dash for None."""
    return "-" if ends is None else f"{ends[0]:z.3f} to {ends[1]:z.3f}"
