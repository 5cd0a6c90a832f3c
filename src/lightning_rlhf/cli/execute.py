"""A job that Hydra has composed: run its stage or its recipe, and say how to go on after a stop."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf.callbacks.checkpoint_files import numbered, step_named
from lightning_rlhf.callbacks.terminal import print_line
from lightning_rlhf.cli.messages import composition_error, program_name
from lightning_rlhf.cli.overrides import (
    check_stage,
    parse_overrides,
    refuse_absent_callbacks,
    refuse_other_stages,
    refuse_processes,
    stage_of,
)
from lightning_rlhf.cli.processes import run_processes
from lightning_rlhf.cli.recipe import (
    own_configs,
    read_recipe,
    recipe_folder,
    run_program,
    run_recipe,
)
from lightning_rlhf.cli.secrecy import without_secrets
from lightning_rlhf.core.errors import ConfigError, RLHFError
from lightning_rlhf.parallel.world import world
from lightning_rlhf.stages import paths
from lightning_rlhf.stages.folder.folders import (
    CHECKPOINTS,
    FINAL,
    folder_of,
    is_unbegun,
    is_used,
    state_of,
)
from lightning_rlhf.stages.process import IN_RECIPE
from lightning_rlhf.stages.registry import STAGES, stage_names
from lightning_rlhf.stages.settings import folder_names, plain, read_settings
from lightning_rlhf.stages.stage import AUTO, Settings
from lightning_rlhf.stages.start import check_run, complete, plan_run, run_stage

NEXT = {"sft": "rm", "rm": "ppo", "ppo": "eval_policy"}
"""Stage -> the one that follows it."""
ONCE = ("stage", "final", "resume", "overwrite", "preflight", "record")
"""Keys of a command that are not those of the next one."""


def next_command(settings: Settings, overrides: Sequence[str]) -> str:
    """Return the command that goes on from a finished stage that hands over a model."""
    words = ["chat", str(folder_of(settings) / FINAL)]
    if settings.stage in NEXT:
        given = [o for o in parse_overrides(overrides) if o.key_or_group not in ONCE]
        kept = [str(o.input_line) for o in given if stage_of(o, STAGES) is None]
        words = [*own_configs(), f"stage={NEXT[settings.stage]}", *kept]
    return without_secrets(f"{program_name()} {shlex.join(words)}", overrides)


def resume_hint(cfg: DictConfig, in_sweep: bool) -> list[str]:
    """Return how to resume a stopped run; an empty list where there is nothing to resume."""
    if in_sweep or cfg.recipe is not None:
        return [f"the same command{', without overwrite=true,' * bool(cfg.overwrite)} goes on"]
    try:
        settings = read_settings(cfg)
        folder = folder_of(settings)
        if not is_used(folder) or (folder / FINAL).is_dir():
            return []
        if settings.resume == AUTO:
            return ["the same command goes on"]
        if saved := numbered(folder / CHECKPOINTS):
            return [f"resume=auto goes on from the checkpoint of step {step_named(saved[-1])}"]
        if is_unbegun(folder) or not settings.definition.trains:
            return ["the same command starts it over"]
    except RLHFError:
        return []
    every = f"{settings.stage}.checkpoint_every={settings.config.checkpoint_every}"
    return [f"it has no checkpoint yet ({every}), resume=auto starts it over"]


def stage_settings(cfg: DictConfig, in_sweep: bool) -> Settings:
    """Return the checked settings of a stage. Raises ConfigError naming a key or an override."""
    overrides = given_overrides()
    unresolved: Any = OmegaConf.to_container(cfg)
    stage = OmegaConf.select(cfg, "stage", throw_on_resolution_failure=False)
    names = stage_names(unresolved)
    check_stage(stage, unresolved, HydraConfig.get().runtime.config_sources)
    if not in_sweep and stage in names:
        refuse_other_stages(stage, overrides, names)
    refuse_absent_callbacks(overrides)
    return read_settings(cfg)


def given_overrides() -> list[str]:
    """Return the overrides of the job as typed; indexing the list resolves an interpolation."""
    overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task)
    return overrides


def execute(cfg: DictConfig, in_sweep: bool) -> None:
    """Run the recipe, or the stage; a repeated sweep runs only the jobs that are not finished."""
    overrides = given_overrides()
    if OmegaConf.select(cfg, "recipe", throw_on_resolution_failure=False) is not None:
        if OmegaConf.select(cfg, "stage", throw_on_resolution_failure=False) is not None:
            raise ConfigError(f"recipe={cfg.recipe} runs its own stages; leave stage= out, or it")
        refuse_processes("a recipe")
        folder_names(plain(cfg))
        folder = recipe_folder(cfg.recipe, paths.RECIPES)
        recipe = read_recipe(folder)
        try:
            if recipe.program is None:
                run_recipe(recipe, cfg, overrides)
            else:
                run_program(recipe, folder, cfg, overrides)
        except (HydraException, OmegaConfBaseException) as error:  # the recipe's own overrides
            given = Namespace(overrides=overrides, multirun=False, config_name=None)
            raise ConfigError(
                f"{folder / 'recipe.yaml'}: {composition_error(error, given)}"
            ) from error
        return
    settings = stage_settings(cfg, in_sweep)
    if settings.preflight == "plan":
        plan_run(settings)
        return
    if settings.preflight == "only":
        check_run(settings)
        return
    if in_sweep and not settings.overwrite:
        state = state_of(settings)
        if state == "done":
            complete(settings)
            return
        resume = (settings.resume or AUTO) if state == "cut off" else False
        settings = replace(settings, resume=resume, overwrite=state == "outdated")
    trainer, definition = settings.trainer, settings.definition
    # Without processes on the other machines, a stage that does not train computes in this one.
    is_startable = definition.trains or (definition.divides and trainer.num_nodes == 1)
    if trainer.processes > 1 and world().size == 1 and is_startable:
        run_processes(settings, overrides)
    else:
        run_stage(settings)
    is_alone = not in_sweep and IN_RECIPE not in os.environ
    if is_alone and definition.hands_over == "model":
        print_line(f"next: {next_command(settings, overrides)}")
