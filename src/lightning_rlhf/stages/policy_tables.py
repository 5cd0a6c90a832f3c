"""Tables of evaluation.json, the evaluation of policies, for a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_rlhf.core.metrics import EVAL_PART, HELD_OUT, HELD_OUT_KL, PASS, heading_of
from lightning_rlhf.io.storage import json_lines
from lightning_rlhf.report.conclusion import Evaluated
from lightning_rlhf.report.evaluation_page import NUMBERS as EVALUATION
from lightning_rlhf.report.evaluation_page import SAMPLES
from lightning_rlhf.report.run_page import PairedSample, TextTable
from lightning_rlhf.report.tables import score_text
from lightning_rlhf.stages.measured import NUMBERS, damage_named, optional_json

METRICS = {number: metric for metric, number in NUMBERS.items()}
"""Number of a response -> the metric that is its mean, where it is not named after it."""


def policy_tables(path: Path) -> list[TextTable]:
    """Return the tables of an evaluation of policies; none without such a file."""
    if (found := optional_json(path)) is None:
        return []
    with damage_named(path):
        policies = found["policies"]
        tables = []
        for decoding in dict.fromkeys(d for by_decoding in policies.values() for d in by_decoding):
            columns = [policies[name].get(decoding, {}) for name in policies]
            names = list(dict.fromkeys(name for column in columns for name in column))
            for kind, is_pass in (("", False), (", pass@k", True)):
                rows = [
                    [label(name), *(number(column.get(name)) for column in columns)]
                    for name in names
                    if name.startswith(PASS) == is_pass
                ]
                title = f"Evaluation of policies, {decoding} responses{kind}"
                if rows:
                    tables.append(TextTable(title=title, heading=["", *policies], rows=rows))
        heading = ["", "difference [95%]", "win rate [95%]", "ties"]
        paired: dict[str, list[list[str]]] = {}
        for one in found["comparisons"]:
            title = f"{one['policy']} - {one['other']}, {one['decoding']} responses, paired"
            paired.setdefault(title, []).append(
                [
                    label(METRICS.get(one["number"], f"eval/{one['number']}")),
                    number(one["difference"]) + interval(one["interval"]),
                    number(one["win_rate"]) + interval(one["win_interval"]),
                    number(one["ties"]),
                ]
            )
        tables += [
            TextTable(title=title, heading=heading, rows=rows) for title, rows in paired.items()
        ]
        return tables


def policy_pairs(final: Path, count: int) -> list[PairedSample]:
    """Return greedy responses of the SFT model and of the first policy to the same prompts.

    final: `final/` folder of an evaluation of policies; [] for one of another stage.
    """
    path = final / SAMPLES
    if not (final / EVALUATION).is_file() or not path.is_file():
        return []
    found = []
    with damage_named(path):
        for row in (row for _, row in json_lines(path) if row["decoding"] == "greedy"):
            (other, before), (policy, after) = list(row["responses"].items())[:2]
            found.append(
                PairedSample(
                    prompt=row["prompt"],
                    before=before["response"],
                    before_numbers=f"{other}: {score_text(before)}",
                    after=after["response"],
                    after_numbers=f"{policy}: {score_text(after)}",
                )
            )
    return found[:count]


def policy_evaluated(path: Path) -> list[Evaluated]:
    """Return the metrics of the first policy, with its gain over the SFT model; [] without a file.

    path: evaluation.json.
    """
    if (found := optional_json(path)) is None:
        return []
    with damage_named(path):
        metrics: dict[str, float] = found["metrics"]
        gain = metrics.get("eval/reward_gain")
        low, high = (metrics.get(f"eval/reward_gain_{end}") for end in ("low", "high"))
        reward = Evaluated(
            metric=HELD_OUT,
            value=metrics[HELD_OUT],
            before=None if gain is None else metrics[HELD_OUT] - gain,
            gain=gain,
            gain_interval=None if low is None or high is None else (low, high),
        )
        has_kl = HELD_OUT_KL in metrics
        kl = [Evaluated(metric=HELD_OUT_KL, value=metrics[HELD_OUT_KL])] if has_kl else []
        return [reward, *kl]


def label(metric: str) -> str:
    """Return the label of a metric in a table."""
    if metric.startswith(PASS):
        k, _, score = metric.removeprefix(PASS).partition("/")
        return f"{heading_of(f'eval/{score}')}, pass@{k}"
    return heading_of(metric.removeprefix(EVAL_PART))


def number(found: float | None) -> str:
    return "-" if found is None else f"{found:z.3f}"


def interval(found: Sequence[float] | None) -> str:
    return "" if found is None else f" [{found[0]:z.3f}, {found[1]:z.3f}]"
