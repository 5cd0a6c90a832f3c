"""lightning-rlhf report, diminishing, compare and dashboard: pages of runs that are there."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
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
    from wandb_workspaces.workspaces import Workspace


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
    entity, slash, project = given.project.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise ConfigError(
            f"PROJECT is {given.project!r}; allowed: ENTITY/PROJECT, as in wandb.ai/ENTITY/PROJECT"
        )
    try:
        workspace = build_workspace(entity, project, given.name, given.sweep or SWEPT)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"dashboard needs {error.name}: pip install 'lightning-rlhf[dashboard]'"
        ) from error
    if given.dry_run:
        tree = Tree(f"{entity}/{project}: {given.name}")
        for section in workspace.sections:
            branch = tree.add(section.name)
            for panel in section.panels:
                branch.add(str(getattr(panel, "title", None) or getattr(panel, "table_name", "")))
        get_console().print(tree)
        return
    import requests
    import wandb

    try:
        workspace.save()  # which prints its address
    except (wandb.errors.Error, requests.RequestException, ValueError) as error:
        raise ConfigError(
            f"W&B did not save the workspace in {entity}/{project}: {str(error).rstrip('.')}. Is "
            "the project there, and did you `wandb login`? --dry-run prints the panels"
        ) from error


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
    from wandb_workspaces.reports import v2 as panels
    from wandb_workspaces.workspaces import Section, Workspace, WorkspaceSettings

    def line(name: str) -> Any:
        """Return the panel of a metric over iterations; of NAME<part>, all of its parts."""
        prefix, is_family, _ = name.partition("<")
        if is_family:
            return panels.LinePlot(title=name, x=AXIS, metric_regex=f"^{prefix}.*")
        return panels.LinePlot(title=name, x=AXIS, y=[name], title_y=METRICS[name].unit)

    sections = {"Headline": [line(name) for name in HEADLINES]}
    x, y = (panels.SummaryMetric(metric) for metric in COMPARED)
    axes: list[Any] = [*map(panels.Config, swept), x, y]
    sections["Runs compared"] = [
        panels.ScatterPlot(title="reward against KL", x=x, y=y),
        panels.ParallelCoordinatesPlot(
            title="runs of a sweep",
            columns=[panels.ParallelCoordinatesPlotColumn(metric=axis) for axis in axes],
        ),
    ]
    for title, (stage, phases) in SECTIONS.items():
        sections[title] = [
            line(name)
            for name, metric in METRICS.items()
            if stage in metric.stages and metric.phase in phases and name not in HEADLINES
        ]
    sections["Samples"] = [panels.WeavePanelSummaryTable(table_name="samples")]
    opened = ("Headline", "Runs compared")
    return Workspace(
        entity=entity,
        project=project,
        name=name,
        settings=WorkspaceSettings(x_axis=AXIS, smoothing_type="none"),
        sections=[
            Section(name=title, panels=list(found), is_open=title in opened)
            for title, found in sections.items()
        ],
    )
