"""A W&B workspace whose sections and panels are the metrics of METRICS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_rlhf.callbacks.names import METRICS, Phase
from lightning_rlhf.callbacks.wandb_logger import AXIS
from lightning_rlhf.core.config import Stage

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import LinePlot, ParallelCoordinatesPlot, ScatterPlot
    from wandb_workspaces.workspaces import Section, Workspace

HEADLINE = ("reward_mean", "kl_divergence", "entropy", "ppo_loss")
"""Metrics of the first section, which is open."""
SECTIONS: dict[str, tuple[Stage, Sequence[Phase]]] = {
    "Rollout": ("ppo", ["rollout"]),
    "Update": ("ppo", ["update"]),
    "Evaluation": ("ppo", ["eval"]),
    "Time": ("ppo", ["time"]),
    "Compute": ("ppo", ["compute"]),
    "SFT": ("sft", ["update", "eval", "compute"]),
    "Reward model": ("rm", ["update", "eval", "compute"]),
    "DPO": ("dpo", ["update", "eval", "compute"]),
    "Ranked responses": ("rank", ["rank", "eval"]),
    "Evaluation of policies": ("eval_policy", ["eval"]),
}
"""Title of a section -> the stage and the phases whose metrics it shows."""
TABLES = {"samples": "prompts, responses and scores"}
"""Key of a W&B table -> title of its panel."""
SWEPT = ("ppo.kl_coef", "ppo.lr", "seed")
"""Configuration keys on the axes of the parallel coordinates, unless others are given."""
COMPARED = ("kl_divergence", "reward_mean")
"""Metrics that end the parallel coordinates, and x and y of the scatter plot over runs."""


def build_workspace(
    entity: str, project: str, name: str, swept: Sequence[str] = SWEPT
) -> Workspace:
    """Return the workspace, not saved yet; nothing is asked of a server.

    Raises ModuleNotFoundError where wandb-workspaces is not installed.
    swept: configuration keys on the axes of the parallel coordinates.
    """
    from wandb_workspaces.reports.v2 import WeavePanelSummaryTable
    from wandb_workspaces.workspaces import Section, Workspace, WorkspaceSettings

    def section(title: str, panels: Iterable[Any], *, is_open: bool = False) -> Section:
        return Section(name=title, panels=list(panels), is_open=is_open)

    tables = [WeavePanelSummaryTable(table_name=key) for key in TABLES]
    return Workspace(
        entity=entity,
        project=project,
        name=name,
        settings=WorkspaceSettings(x_axis=AXIS, smoothing_type="none"),
        sections=[
            section("Headline", map(line, HEADLINE), is_open=True),
            section("Runs compared", compared(swept), is_open=True),
            *(section(title, map(line, names(*what))) for title, what in SECTIONS.items()),
            section("Samples", tables),
        ],
    )


def names(stage: Stage, phases: Sequence[Phase]) -> Iterator[str]:
    """Yield the metrics of a stage and its phases that are not in the headline."""
    for name, metric in METRICS.items():
        if stage in metric.stages and metric.phase in phases and name not in HEADLINE:
            yield name


def line(name: str) -> LinePlot:
    """Return the panel of a metric over iterations; of a name with <part>, all of its parts."""
    from wandb_workspaces.reports.v2 import LinePlot

    prefix, is_family, _ = name.partition("<")
    if is_family:
        return LinePlot(title=name, x=AXIS, metric_regex=f"^{prefix}.*")
    return LinePlot(title=name, x=AXIS, y=[name], title_y=METRICS[name].unit)


def compared(swept: Sequence[str]) -> tuple[ScatterPlot, ParallelCoordinatesPlot]:
    """Return reward against KL, one point a run, and the coordinates of a sweep, one line a run."""
    from wandb_workspaces.reports.v2 import (
        Config,
        ParallelCoordinatesPlot,
        ParallelCoordinatesPlotColumn,
        ScatterPlot,
        SummaryMetric,
    )

    x, y = (SummaryMetric(metric) for metric in COMPARED)
    axes: list[Config | SummaryMetric] = [*map(Config, swept), x, y]
    return (
        ScatterPlot(title="reward against KL", x=x, y=y),
        ParallelCoordinatesPlot(
            title="runs of a sweep",
            columns=[ParallelCoordinatesPlotColumn(metric=axis) for axis in axes],
        ),
    )
