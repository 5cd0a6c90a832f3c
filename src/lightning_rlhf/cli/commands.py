"""lightning-rlhf report, diminishing, compare and dashboard: pages of runs that are there."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import get_console
from rich.tree import Tree

from lightning_rlhf.callbacks.loggers import AXIS
from lightning_rlhf.core.config import Stage
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.metrics import HEADLINES, KL, METRICS, REWARD, Phase
from lightning_rlhf.evaluation.compare import compare_runs, write_report
from lightning_rlhf.evaluation.diminishing import again
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import refuse_foreign, written_whole

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import LinePlot, ParallelCoordinatesPlot, ScatterPlot
    from wandb_workspaces.workspaces import Section, Workspace


def report(arguments: Sequence[str]) -> None:
    """Write report.html of a run, and print its path."""
    parser = ArgumentParser(
        prog="lightning-rlhf report",
        description="Write report.html, one page with verdict, curves, evaluation, samples and "
        "configuration, into the folder of a run, as the run itself does at its end; or about all "
        "stages into the folder above, as a recipe does.",
    )
    parser.add_argument("run", help="outputs/<run>/<model>/<stage>, or outputs/<run>/<model>")
    print_line(f"report: {write_report(Path(parser.parse_args(arguments).run))}")


def diminishing(arguments: Sequence[str]) -> None:
    """Write and print the point of diminishing returns of a run."""
    parser = ArgumentParser(
        prog="lightning-rlhf diminishing",
        description="Find the iteration of a run of stage=ppo after which more compute bought next "
        "to nothing, from its metrics.csv. Writes diminishing.json and diminishing.png into its "
        "folder, as the run itself does at its end.",
    )
    parser.add_argument("run", help="folder of the run, as outputs/<run>/<model>/ppo")
    again(Path(parser.parse_args(arguments).run))


def compare(arguments: Sequence[str]) -> None:
    """Print the tables of several runs, or of a sweep, and write the page."""
    parser = ArgumentParser(
        prog="lightning-rlhf compare",
        description="Compare runs of a stage: means with intervals over seeds, overlaid curves, "
        "rewards at equal KL, and what differs in configuration. Runs that differ in their seed "
        "alone are one group.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN",
        help="folder of a run, or one above runs, as that of a sweep",
    )  # fmt: skip
    parser.add_argument("--stage", help="which runs to take, where there are several stages (ppo)")
    parser.add_argument("--out", default="compare.html", help="the page (%(default)s)")
    given = parser.parse_args(arguments)
    out = Path(given.out)
    refuse_foreign(out, "page")
    found = compare_runs([Path(run) for run in given.runs], given.stage, fewest=2)
    for table in found.console():
        get_console().print(table)
    with written_whole(out, kind="page") as beside:
        found.write(beside, f"{found.stage}: {', '.join(given.runs)}")
    print_line(f"comparison: {out}")


def dashboard(arguments: Sequence[str]) -> None:
    """Build a W&B workspace with the metrics of the package, then save or print it."""
    parser = ArgumentParser(
        prog="lightning-rlhf dashboard",
        description="Make a workspace in a W&B project: headline metrics, rollout, update, "
        "evaluation, time, samples, reward against KL over runs, and parallel coordinates for "
        "sweeps. It takes the extra dashboard: pip install 'lightning-rlhf[dashboard]'.",
    )
    parser.add_argument(
        "project", metavar="ENTITY/PROJECT", help="where runs with logger=wandb are"
    )
    parser.add_argument("--name", default="lightning-rlhf", help="name of the workspace")
    parser.add_argument(
        "--sweep", nargs="+", metavar="KEY",
        help="configuration keys on the parallel coordinates (ppo.kl_coef ppo.lr seed)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the panels, save nothing")
    given = parser.parse_args(arguments)
    entity, project = project_of(given.project)
    workspace = workspace_of(entity, project, given.name, given.sweep)
    if given.dry_run:
        get_console().print(outline(workspace))
    else:
        save_workspace(workspace)


def project_of(path: str) -> tuple[str, str]:
    """Return entity and project of ENTITY/PROJECT. Raises ConfigError for anything else."""
    entity, slash, project = path.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise ConfigError(
            f"PROJECT is {path!r}; allowed: ENTITY/PROJECT, as in wandb.ai/ENTITY/PROJECT"
        )
    return entity, project


def workspace_of(entity: str, project: str, name: str, swept: Sequence[str] | None) -> Workspace:
    """Return the workspace. Raises ConfigError where wandb-workspaces is not installed."""
    try:
        return build_workspace(entity, project, name, swept or SWEPT)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"dashboard needs {error.name}: pip install 'lightning-rlhf[dashboard]'"
        ) from error


def save_workspace(workspace: Workspace) -> None:
    """Save the workspace in W&B, which prints its address. Raises ConfigError if W&B refuses."""
    import requests
    import wandb

    try:
        workspace.save()
    except (wandb.errors.Error, requests.RequestException, ValueError) as error:
        raise ConfigError(
            f"W&B did not save the workspace in {workspace.entity}/{workspace.project}: "
            f"{str(error).rstrip('.')}. Is the project there, and did you `wandb login`? --dry-run "
            "prints the panels"
        ) from error


def outline(workspace: Workspace) -> Tree:
    """Return the sections and panels as a tree."""
    tree = Tree(f"{workspace.entity}/{workspace.project}: {workspace.name}")
    for section in workspace.sections:
        branch = tree.add(section.name)
        for panel in section.panels:
            branch.add(str(getattr(panel, "title", None) or getattr(panel, "table_name", panel)))
    return tree


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
COMPARED = (KL, REWARD)
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
            section("Headline", map(line, HEADLINES), is_open=True),
            section("Runs compared", compared(swept), is_open=True),
            *(section(title, map(line, names(*what))) for title, what in SECTIONS.items()),
            section("Samples", tables),
        ],
    )


def names(stage: Stage, phases: Sequence[Phase]) -> Iterator[str]:
    """Yield the metrics of a stage and its phases that are not in the headline."""
    for name, metric in METRICS.items():
        if stage in metric.stages and metric.phase in phases and name not in HEADLINES:
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
