"""The verdict on a run in one sentence, from the facts of its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_rlhf.core.errors import counted
from lightning_rlhf.core.metrics import GOLD, HELD_OUT_KL, label_of
from lightning_rlhf.report.estimates import Interval

Level = Literal["good", "doubtful", "bad", "unknown"]
LEVELS: tuple[Level, ...] = ("unknown", "good", "doubtful", "bad")
"""Levels of a verdict; of several the last one counts."""
PERPLEXITY, UNIGRAM = "eval/perplexity", "eval/unigram_perplexity"
LITTLE = 0.75
"""Share of the loss of token frequencies from which a model has learned little: that of pairs of
words on the Wall Street Journal, log 170 / log 962 (Jurafsky and Martin, chapter 3)."""
GUESSING = 0.5
"""Accuracy of guessing which of two responses is preferred."""


@dataclass(frozen=True, kw_only=True)
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


def conclude(
    evaluated: Sequence[Evaluated],
    goal: Sequence[tuple[str, Literal["min", "max"]]],
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
    rewards: verdicts of fitness reports, on the run's own reward model or on what it is paid.
    """
    known = {one.metric: one for one in evaluated}
    metrics = [(metric, direction) for metric, direction in goal[:1] if metric in known]
    if GOLD in known:
        metrics.append((GOLD, "max"))
    judged = [judge(known[metric], direction) for metric, direction in metrics]
    parts = [one.words for one in judged]
    if not judged and not rewards:
        parts.append("nothing was evaluated")
    levels: list[Level] = [one.level for one in judged]
    if {PERPLEXITY, UNIGRAM} <= known.keys():
        found, unigram = known[PERPLEXITY].value, known[UNIGRAM].value
        parts.append(f"the perplexity is {found:.3g}, and {unigram:.3g} by token frequencies alone")
        if found >= max(unigram, 1) ** LITTLE:  # the losses are the logarithms
            levels.append("doubtful")
            parts[-1] += ": the model has learned little"
    if HELD_OUT_KL in known:
        parts.append(f"the KL to the SFT model is {measured(known['eval/kl'])} nats a response")
    if findings:
        levels.append("doubtful")
        parts.append(f"the diagnosis has {counted(findings, 'finding')}")
    if diverges:
        levels.append("doubtful")
    if sentence is not None:
        parts.append(sentence)
    for one in rewards:
        levels.append(one.level)
        parts.append(one.words.rstrip("."))
    if not is_finished:
        levels.append("doubtful")
        parts.insert(0, "the run has not finished")
    words = "; ".join(parts)
    level: Level = max(levels, key=LEVELS.index, default="unknown")
    return Verdict(level, f"{words[:1].upper()}{words[1:]}.")


def judge(one: Evaluated, direction: Literal["min", "max"]) -> Verdict:
    """Return whether a metric improved: beyond doubt where its interval lies on one side of 0."""
    label = label_of(one.metric)
    if one.metric == "eval/accuracy":
        return Verdict(
            _sign(one.value - GUESSING, _shifted(one.interval, GUESSING), "max"),
            f"{label} is {measured(one)}",
        )
    if one.gain is None:
        return Verdict("unknown", f"{label} is {measured(one)}, evaluated once")
    level, change = _sign(one.gain, one.gain_interval, direction), short(abs(one.gain))
    if change == "0":
        return Verdict(level, f"{label} did not change and is {short(one.value)}")
    rises = one.gain > 0
    interval = ""
    if one.gain_interval is not None:
        low, high = one.gain_interval if rises else (-one.gain_interval[1], -one.gain_interval[0])
        interval = f" [{short(low)}, {short(high)}]"
    words = f"{'rose' if rises else 'fell'} by {change}{interval} to {short(one.value)}"
    return Verdict(level, f"{label} {words}")


def measured(one: Evaluated) -> str:
    """Return a value with its interval."""
    if one.interval is None:
        return short(one.value)
    return f"{short(one.value)} [{short(one.interval[0])}, {short(one.interval[1])}]"


def short(value: float) -> str:
    """Return a number with three digits, and at most four decimals: what is smaller is 0."""
    return f"{round(value, 4):z.3g}"


def _shifted(interval: Interval | None, by: float) -> Interval | None:
    return None if interval is None else (interval[0] - by, interval[1] - by)


def _sign(gain: float, interval: Interval | None, direction: Literal["min", "max"]) -> Level:
    """Return the level of a gain; one without an interval may be noise, and is never bad."""
    low, high = interval or (gain, gain)
    if direction == "min":
        low, high = -high, -low
    if low > 0:
        return "good"
    return "bad" if high < 0 and interval is not None else "doubtful"
