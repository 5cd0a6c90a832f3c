"""Numbers of a run on its page: fitness of a reward, what was measured once, and compute."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_rlhf.callbacks.names import FITNESS as FITNESS_METRICS
from lightning_rlhf.callbacks.names import METRICS as DEFINITIONS
from lightning_rlhf.models.verdict import PAGE as FITNESS_PAGE
from lightning_rlhf.report.conclusion import Evaluated, label_of
from lightning_rlhf.report.evaluation_page import NUMBERS as EVALUATION
from lightning_rlhf.report.run_page import TextTable, duration
from lightning_rlhf.stages.folder.folders import FINAL
from lightning_rlhf.stages.run_files import RunFiles


def fitness_tables(run: RunFiles) -> list[TextTable]:
    """Return the numbers of a fitness report, and where the report is; nothing without one."""
    found = {
        name.removeprefix(FITNESS_METRICS).replace("_", " "): f"{values[-1]:z.3g}"
        for name, (_, values) in run.curves.items()
        if name.startswith(FITNESS_METRICS)
    }
    if not found:
        return []
    low, high = found.pop("accuracy low", None), found.pop("accuracy high", None)
    if "accuracy" in found and low is not None:
        found["accuracy"] += f" [{low}, {high}]"
    return [
        TextTable(
            title="Fitness of the reward",
            heading=["", "value [95%]"],
            rows=list(map(list, found.items())),
            note=f"All numbers with their definitions, checks and pictures: {FINAL}/{FITNESS_PAGE}",
        )
    ]


def results(run: RunFiles, evaluated: Sequence[Evaluated]) -> str:
    """Return what a stage without a goal ends with, as `rank`; "" where the page says it."""
    stage = run.definition
    if stage is None or stage.goal or (run.folder / FINAL / EVALUATION).is_file():
        return ""
    shown = {one.metric for one in evaluated}
    ends = [name for name in stage.summary if name in run.curves and name not in shown]
    ends = [name for name in ends if not name.startswith(FITNESS_METRICS)]
    return "; ".join(f"{label_of(name)} is {plain(run.curves[name][1][-1])}" for name in ends)


def single_numbers(run: RunFiles, evaluated: Sequence[Evaluated]) -> list[TextTable]:
    """Return the metrics that were measured once, and are shown nowhere else, as a table."""
    shown = {one.metric for one in evaluated}
    others = (FITNESS_METRICS, "time/", "compute/")
    rows = [
        [name, plain(values[0]), DEFINITIONS[name].unit if name in DEFINITIONS else ""]
        for name, (_, values) in run.curves.items()
        if len(values) == 1 and name not in shown and not name.startswith(others)
    ]
    if not rows or (run.folder / FINAL / EVALUATION).is_file():
        return []
    return [TextTable(title="Numbers", heading=["metric", "value", "unit"], rows=rows)]


def totals(run: RunFiles) -> list[tuple[str, str]]:
    """Return the totals of compute of a run, with their units."""
    found = [
        (name, amount(run.curves[name][1][-1], DEFINITIONS[name].unit))
        for name in run.curves
        if name.startswith("compute/") and name in DEFINITIONS
    ]
    if run.manifest is not None and "time/stage_s" in run.manifest.metrics:
        found.append(("the whole stage", duration(run.manifest.metrics["time/stage_s"])))
    return found


def plain(value: float) -> str:
    """Return a number with three digits; a whole one with all."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:z.3g}"


def amount(value: float, unit: str) -> str:
    """Return an amount of compute: "139,600 tokens", "2.15 TFLOP", "805.90 MB" or "4.5 min"."""
    from matplotlib.ticker import EngFormatter

    if unit == "s":
        return duration(value)
    if unit == "tokens":
        return f"{value:,.0f} tokens"
    return EngFormatter("B" if unit == "bytes" else unit, places=2)(value)
