"""lightning-rlhf dashboard: a W&B workspace with the metrics of the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import get_console
from rich.tree import Tree

from lightning_rlhf.core.errors import ConfigError, RLHFError
from lightning_rlhf.stages.console import print_error

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace


def dashboard(arguments: Sequence[str]) -> None:
    """Build the workspace, then save or print it; exit with status 1 after an error."""
    given = parser().parse_args(arguments)
    try:
        entity, project = split(given.project)
        workspace = build(entity, project, given.name, given.sweep)
        if given.dry_run:
            get_console().print(outline(workspace))
        else:
            save(workspace)
    except RLHFError as error:
        print_error(str(error))
        sys.exit(1)


def split(path: str) -> tuple[str, str]:
    """Return entity and project of ENTITY/PROJECT. Raises ConfigError for anything else."""
    entity, slash, project = path.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise ConfigError(
            f"PROJECT is {path!r}; allowed: ENTITY/PROJECT, as in wandb.ai/ENTITY/PROJECT"
        )
    return entity, project


def build(entity: str, project: str, name: str, swept: Sequence[str] | None) -> Workspace:
    """Return the workspace. Raises ConfigError where wandb-workspaces is not installed."""
    try:
        from lightning_rlhf.callbacks.dashboard import SWEPT, build_workspace

        return build_workspace(entity, project, name, swept or SWEPT)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"dashboard needs {error.name}: pip install 'lightning-rlhf[dashboard]'"
        ) from error


def save(workspace: Workspace) -> None:
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


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
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
    return parser
