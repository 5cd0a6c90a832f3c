"""METRICS: the definition of every metric name, with its formula, unit and healthy range."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_rlhf.callbacks.definitions.cost import COST
from lightning_rlhf.callbacks.definitions.evaluation import EVALUATION
from lightning_rlhf.callbacks.definitions.metric import PPO as PPO
from lightning_rlhf.callbacks.definitions.metric import Metric as Metric
from lightning_rlhf.callbacks.definitions.metric import Phase as Phase
from lightning_rlhf.callbacks.definitions.rank import RANKED
from lightning_rlhf.callbacks.definitions.rollout import ROLLOUT
from lightning_rlhf.callbacks.definitions.update import UPDATE
from lightning_rlhf.rewards.prefixes import BEST_JUDGE, EVAL_PART, INTERVALS, JUDGE, PART, PASS

FITNESS = "fitness/"
"""Prefix of the metrics of a fitness report, which defines them."""

MACHINE = ("time/", "compute/device_s", "compute/peak_memory")
"""Starts of the names of metrics that a repeated run measures differently."""

CHOSEN_NAMES = (JUDGE, BEST_JUDGE, PART, EVAL_PART, FITNESS, PASS, *INTERVALS)
"""Prefixes of metrics whose names are not listed in METRICS."""

METRICS: dict[str, Metric] = {**ROLLOUT, **UPDATE, **EVALUATION, **RANKED, **COST}
"""Name -> definition of every metric, in the order of docs/metrics.md."""


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for names that are not defined in METRICS."""
    unknown = [n for n in names if n not in METRICS and not n.startswith(CHOSEN_NAMES)]
    if unknown:
        raise ValueError(
            f"metrics {unknown} have no row in METRICS (lightning_rlhf/callbacks/definitions); "
            "add one that says what they mean"
        )


def metrics_table() -> str:
    """Return METRICS as a Markdown table."""
    lines = [
        "| metric | stage | phase | what it is | unit | healthy |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {', '.join(m.stages)} | {m.phase} | {m.formula} | {m.unit} | {m.healthy} |"
        for name, m in METRICS.items()
    ]
    return "\n".join(lines)
