"""Pages: a verdict in one sentence, then sections; report.html, compare.html and replays are such.

A page is self-contained, and shows any text as text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lightning_rlhf.core.errors import counted
from lightning_rlhf.core.metrics import GOLD, HELD_OUT_KL, Goal, heading_of, label_of
from lightning_rlhf.report import figures, tables
from lightning_rlhf.report.estimates import Interval, interval_text
from lightning_rlhf.report.tables import BLUE, GREEN, ORANGE, RED, Table, colour, marked, shown

TEMPLATES = Path(__file__).parent / "templates"
Level = Literal["unknown", "good", "doubtful", "bad"]
LEVELS: Sequence[Level] = get_args(Level)
"""Levels of a verdict; of several the last one counts."""
MARKS = dict(zip(LEVELS, "–✓!✗", strict=True))
WORDS = {level: level for level in LEVELS} | {"unknown": "not judged"}
"""Sign of each level of a verdict, which is readable without colour, and its name."""
PromiseVerdict = Literal["kept", "within noise", "broken"]
KEPT: Mapping[PromiseVerdict, Level] = {"kept": "good", "within noise": "doubtful", "broken": "bad"}
"""Verdict on a promise of a recipe -> its level."""
PERPLEXITY, UNIGRAM = "eval/perplexity", "eval/unigram_perplexity"
LITTLE = 0.75
"""Share of the loss of token frequencies from which a model has learned little: that of pairs of
words on the Wall Street Journal, log 170 / log 962 (Jurafsky and Martin, chapter 3)."""
GUESSING = 0.5
"""Accuracy of guessing which of two responses is preferred."""


@dataclass(frozen=True)
class Evaluated:
    """A metric of the last evaluation, and its gain over the first one."""

    metric: str
    value: float
    interval: Interval | None = None
    """95% interval of the value; None where it is not known."""
    before: float | None = None
    """Value in the first evaluation; None where there was a single one."""
    gain: float | None = None
    gain_interval: Interval | None = None
    """95% interval of the gain; None where it is not known."""


@dataclass(frozen=True)
class Verdict:
    """A level and a sentence."""

    level: Level
    words: str


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """All that a page says about one run of a stage."""

    name: str = ""
    """Name of the run: run/model/stage."""
    title: str = ""
    verdict: Verdict | None = None
    sections: Sequence[tuple[str, str]]
    """Heading, empty for a table, which has its own, and content as HTML, empty to leave it out."""


@dataclass(frozen=True)
class PromiseRow:
    """A promise of a recipe and what was measured, as text."""

    stage: str
    metric: str
    promised: str
    measured: str
    verdict: PromiseVerdict


def write_page(
    path: Path, title: str, stages: Sequence[StageReport], promises: Sequence[PromiseRow] = ()
) -> None:
    """Write the page to `path`, beside which the caller keeps the previous one."""
    template = environment().get_template("page.html")
    page = template.render(title=title, stages=stages, promises=promises)
    path.write_text(page, encoding="utf-8")


@cache
def environment() -> Environment:
    """Return the templates; every value is escaped, with its hidden characters shown."""
    loader = FileSystemLoader(TEMPLATES)
    found = Environment(loader=loader, autoescape=True, finalize=shown, undefined=StrictUndefined)
    found.trim_blocks = found.lstrip_blocks = True
    colors = {"above": GREEN, "below": RED, "rose": ORANGE, "fell": BLUE}
    found.globals.update(draw=figures.figure_of, colors=colors, kept=KEPT, marks=MARKS, words=WORDS)
    found.filters |= {"cut": tables.cut, "marked": marked, "duration": duration, "clauses": clauses}
    found.filters["breakable"] = lambda name: Markup("/<wbr>").join(map(shown, name.split("/")))
    return found


def part(kind: str, content: Sequence[Any], *more: Any) -> str:
    """Return a part of a page as HTML; "" without content.

    kind: name of the macro of parts.html that writes it; content, more: its arguments.
    """
    macros = environment().get_template("parts.html").module
    return getattr(macros, kind)(content, *more) if content else ""


def clauses(words: str) -> list[str]:
    """Return the parts of a verdict, each as a sentence."""
    parts = (part.strip().rstrip(".") for part in words.split(";"))
    return [f"{part[:1].upper()}{part[1:]}." for part in parts if part]


def duration(seconds: float) -> str:
    """Return seconds as text: "12.3 s", "4.5 min" or "3.2 h"."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def token_part(responses: Sequence[Mapping[str, Any]], name: str = "") -> str:
    """Return responses token by token as HTML, coloured on one scale for all; "" without any.

    responses: `heading` and `prompt`; `text`, `advantage` and `kl` of the tokens; `names` and
        `rows`, headings and cells of the table of the tokens.
    name: different for each such part of a page.
    """
    keys, drawn = ("advantage", "kl"), []
    advantage, kl = (tables.scale([x for one in responses for x in one[key]]) for key in keys)
    for one in responses:
        tokens = []
        columns = (one["text"], one["advantage"], one["kl"], one["rows"])
        for text, a, k, row in zip(*columns, strict=True):
            style = f"--advantage: {colour(a / advantage, GREEN, RED)}; "
            style += f"--kl: {colour(k / kl, ORANGE, BLUE)}"
            title = "\n".join(map(" ".join, zip(one["names"], row, strict=True)))
            tokens.append((marked(text), style, title))
        drawn.append({**one, "tokens": tokens})
    return part("tokens", drawn, name)


def conclude(
    evaluated: Sequence[Evaluated],
    goal: Goal,
    *,
    is_finished: bool,
    findings: int,
    sentence: str | None,
    diverges: bool = False,
    rewards: Sequence[Verdict] = (),
) -> Verdict:
    """Return the verdict on a run.

    evaluated: metrics of the evaluations.
    goal: metrics that select the best checkpoint, each with its direction; the first is judged.
    findings: number of findings of the diagnosis; sentence: a further one, as on diminishing
        returns, if any.
    diverges: whether the reward rose while the gold score did not.
    rewards: verdicts of fitness reports, on the run's own reward model or on its reward.
    """
    known = {one.metric: one for one in evaluated}
    aims = [(metric, direction == "min") for metric, direction in (*goal[:1], (GOLD, "max"))]
    facts = [judge(known[metric], is_cost) for metric, is_cost in aims if metric in known]
    if not facts and not rewards:
        facts = [Verdict("unknown", "nothing was evaluated")]
    if not is_finished:
        facts.insert(0, Verdict("doubtful", "the run has not finished"))
    if {PERPLEXITY, UNIGRAM} <= known.keys():
        found, unigram = known[PERPLEXITY].value, known[UNIGRAM].value
        is_little = found >= max(unigram, 1) ** LITTLE  # the losses are the logarithms
        words = f"the perplexity is {found:.3g}, and {unigram:.3g} by token frequencies alone"
        words += ": the model has learned little" * is_little
        facts.append(Verdict("doubtful" if is_little else "unknown", words))
    if HELD_OUT_KL in known:
        kl = short(known[HELD_OUT_KL].value, known[HELD_OUT_KL].interval)
        facts.append(Verdict("unknown", f"the KL to the SFT model is {kl} nats a response"))
    if findings:
        facts.append(Verdict("doubtful", f"the diagnosis has {counted(findings, 'finding')}"))
    if sentence is not None:
        facts.append(Verdict("doubtful" if diverges else "unknown", sentence))
    facts += rewards
    words = "; ".join(one.words.rstrip(".") for one in facts)
    level = max((one.level for one in facts), key=LEVELS.index)
    return Verdict(level, f"{words[:1].upper()}{words[1:]}.")


def judge(one: Evaluated, is_cost: bool) -> Verdict:
    """Return whether a metric improved: beyond doubt where its interval lies on one side of 0.

    is_cost: whether a lower value is better.
    """
    label, value = label_of(one.metric), short(one.value, one.interval)
    if one.metric == "eval/accuracy":
        gain = one.value - GUESSING
        ends = one.interval and (one.interval[0] - GUESSING, one.interval[1] - GUESSING)
        return Verdict(gain_level(gain, ends, False), f"{label} is {value}")
    if one.gain is None:
        return Verdict("unknown", f"{label} is {value}, evaluated once")
    level = gain_level(one.gain, one.gain_interval, is_cost)
    if short(one.gain) == "0":
        return Verdict(level, f"{label} did not change and is {short(one.value)}")
    rises, ends = one.gain > 0, one.gain_interval
    if ends is not None and not rises:
        ends = -ends[1], -ends[0]
    by = short(abs(one.gain), ends)
    return Verdict(level, f"{label} {'rose' if rises else 'fell'} by {by} to {short(one.value)}")


def gain_level(gain: float, interval: Interval | None, is_cost: bool) -> Level:
    """Return the level of a gain; one without an interval may be noise, and is never bad."""
    low, high = interval or (gain, gain)
    if is_cost:
        low, high = -high, -low
    if low > 0:
        return "good"
    return "bad" if high < 0 and interval is not None else "doubtful"


def short(value: float, interval: Interval | None = None) -> str:
    """Return a number with three digits, and at most four decimals, and its interval if any.

    What is smaller is 0.
    """
    text, *ends = (f"{round(x, 4):z.3g}" for x in (value, *(interval or ())))
    return f"{text} [{', '.join(ends)}]" if ends else text


def change(one: Evaluated) -> list[str]:
    """Return the cells of a metric: before, after with its interval, gain with its interval."""
    digits, gain = decimals(one.value, one.interval), "-"
    if one.gain is not None:
        ends = one.gain_interval
        of_gain = digits if ends is None else max(digits, decimals(one.gain, ends))
        gain = f"{one.gain:+z.{of_gain}f}{interval_text(ends, of_gain)}"
    before = "-" if one.before is None else f"{one.before:z.{digits}f}"
    return [before, f"{one.value:z.{digits}f}{interval_text(one.interval, digits)}", gain]


def decimals(value: float, interval: Interval | None) -> int:
    """Return the decimals that show two digits of half an interval; without one, three of value."""
    size, digits = (abs(value), 3) if interval is None else ((interval[1] - interval[0]) / 2, 2)
    if not 0 < size < math.inf:
        return 3
    return min(max(digits - 1 - math.floor(math.log10(size)), 0), 4)


def evaluated_table(evaluated: Sequence[Evaluated]) -> Table:
    """Return the table of the metrics of the evaluations, with gains where there were several."""
    has_gains = any(one.gain is not None for one in evaluated)
    has_ends = any(one.interval or one.gain_interval for one in evaluated)
    ends, note = " [95%]" * has_ends, ""
    if has_gains:
        note = "First and last evaluation on the same held-out data. "
    if has_ends:
        note += "Brackets are 95% intervals by bootstrap over prompts"
        note += "; those of a change are over the paired differences." if has_gains else "."
    names = ["first", f"last{ends}", f"change{ends}"] if has_gains else [f"value{ends}"]
    cells = slice(None) if has_gains else slice(1, 2)
    rows = [[heading_of(one.metric), *change(one)[cells]] for one in evaluated]
    return Table(title="Evaluation", columns=["", *names], rows=rows, note=note)
