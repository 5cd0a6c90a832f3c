"""Recipes that are programs: they train by themselves and return claims about the result."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich import get_console
from rich.table import Table

from lightning_rlhf.cli.overrides import key_of
from lightning_rlhf.cli.recipe import Recipe, composed, stage_overrides
from lightning_rlhf.core.errors import ConfigError, RLHFError, require
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.folder.changes import differing_keys
from lightning_rlhf.stages.folder.folders import check_writable, run_folder
from lightning_rlhf.stages.promises import ANY
from lightning_rlhf.stages.settings import read_settings


def run_program(recipe: Recipe, folder: Path, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Run the program in `folder` with the settings of PPO and print its claims.

    Raises RLHFError where a claim of the unchanged recipe fails.
    """
    assert recipe.program is not None
    require((folder / recipe.program).is_file(), "recipe.program", recipe.program, "a file there")
    sys.path.insert(0, str(folder))
    program: Any = importlib.import_module(Path(recipe.program).stem)
    for key in map(key_of, overrides):
        if key == "advantage" or (key.startswith("ppo.") and key[4:] not in program.READS):
            raise ConfigError(
                f"recipe={cfg.recipe} does not read {key}; allowed: ppo.{', '.join(program.READS)}"
            )
    settings, as_written = (
        read_settings(composed(stage_overrides(recipe, "ppo", given, cfg.job)))
        for given in (overrides, ())
    )
    out = run_folder(settings.outputs, settings.run, folder.name, "", settings.job)
    check_writable("outputs", settings.outputs, out)
    torch.set_num_threads(1)
    claims = program.main(settings.config, settings.seed, out)
    table = Table(title=recipe.title, title_justify="left")
    for column in ("claim", "allowed", "measured", ""):
        table.add_column(column)
    for claim in claims:
        verdict = "[green]holds[/green]" if claim.holds else "[red]fails[/red]"
        allowed = f"{claim.at_least:g} to {claim.at_most:.3g}"
        table.add_row(claim.text, allowed, f"{claim.measured:.3f}", verdict)
    get_console().print(table)
    print_line(f"picture: {out / program.__name__}.png")
    for line in recipe.next:
        print_line(line)
    failed = [claim.text for claim in claims if not claim.holds]
    if failed and not differing_keys(settings.tree, as_written.tree, ANY):
        raise RLHFError(f"{recipe.title}: this fails: {'; '.join(failed)}")
