"""The command: compose the configuration with Hydra, then run a stage or a recipe."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pkgutil
import signal
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import lightning_rlhf
from lightning_rlhf.callbacks.stop import Stopped
from lightning_rlhf.cli.messages import composition_error, program_name
from lightning_rlhf.cli.overrides import (
    ONLY_CHECKS,
    check_choices,
    check_stage,
    completed_stages,
    options_last,
    parse_arguments,
    refuse_absent_callbacks,
    refuse_absent_plugins,
    refuse_group_stage,
    refuse_mistyped,
    refuse_other_stages,
    refuse_several_checks,
)
from lightning_rlhf.cli.secrecy import (
    refuse_secrets,
    secrets_of,
    without_address,
    without_printed,
    without_secrets,
)
from lightning_rlhf.cli.sweep_hook import SweepHook, ignore_presets
from lightning_rlhf.core.errors import ConfigError, RewardError, RLHFError, StorageError
from lightning_rlhf.io.storage import full_disk_told
from lightning_rlhf.io.visible import visible
from lightning_rlhf.parallel.world import IN_LAUNCHER, world
from lightning_rlhf.stages.console import print_error
from lightning_rlhf.stages.paths import CONF, RECIPES
from lightning_rlhf.stages.process import IN_RECIPE, STOPPED, end_with, is_job

COMMANDS = {
    "chat": "lightning_rlhf.cli.chat:chat",
    "compare": "lightning_rlhf.cli.compare:compare",
    "dashboard": "lightning_rlhf.cli.dashboard:dashboard",
    "diminishing": "lightning_rlhf.cli.diminishing:diminishing",
    "export": "lightning_rlhf.cli.export:export",
    "push": "lightning_rlhf.cli.push:push",
    "replay": "lightning_rlhf.cli.replay:replay",
    "report": "lightning_rlhf.cli.report:report",
    "serve-reward": "lightning_rlhf.cli.serve:serve_reward",
}
"""First word of a command that composes no configuration -> the function that runs the rest."""
CHECK = "check"
"""First word of a command that composes one and checks it, without training."""


def main() -> None:
    """Run train.py or the console command."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if IN_LAUNCHER in os.environ:
        end_with(int(os.environ[IN_LAUNCHER]))
    if not world().is_first:
        silence()
    words = sys.argv[1:]
    if words[:1] == [CHECK]:
        words = [*words[1:], ONLY_CHECKS]
    if words == ["--version"]:
        print(f"lightning-rlhf {lightning_rlhf.__version__}")
        return
    if words and words[0] in COMMANDS:
        pkgutil.resolve_name(COMMANDS[words[0]])(words[1:])
        return
    register_resolvers()
    ignore_presets()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # this program prints Hydra's errors itself, in one line
    try:
        refuse_mistyped(words[:1], [*COMMANDS, CHECK])
        given = parse_arguments(words)
        refuse_secrets(given)
        refuse_several_checks(given)
        refuse_absent_plugins(given.overrides)
        if stages := completed_stages(given):
            print(*stages, sep="\n")
            return
        refuse_group_stage(given)
        sys.argv[1:] = options_last(words, given)
        with printed_safely(given):
            compose()
    except RLHFError as error:
        SweepHook.show_ended(str(error))
        print_error(str(error))
        sys.exit(1)
    except Exception as error:
        if "debug=true" in words:
            print(visible(without_secrets(traceback.format_exc(), words)), file=sys.stderr)
        message = composition_error(error, given)
        SweepHook.show_ended(message)
        print_error(message)
        sys.exit(1)
    finally:
        SweepHook.finish()


def silence() -> None:
    """Print nothing in this process, where another one prints the same; tracebacks remain."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")


@contextlib.contextmanager
def printed_safely(given: Namespace) -> Iterator[None]:
    """Remove secrets from the configuration that Hydra prints where it runs no job."""
    if not (given.cfg or given.info or given.help or given.hydra_help):
        yield
        return
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        print(visible(without_printed(printed.getvalue(), given.overrides)), end="")


def register_resolvers() -> None:
    """Register the resolvers and the configuration that conf/ refers to.

    `${recipes:path}` is a path inside recipes/, `${program:}` the command's name, and the
    configuration `open` a mapping that takes any key on the command line.
    """
    OmegaConf.register_new_resolver("program", program_name, replace=True)
    OmegaConf.register_new_resolver("recipes", lambda p: str(RECIPES / p), replace=True)
    ConfigStore.instance().store("open", OmegaConf.create({}, flags={"struct": False}))


def resolved(cfg: DictConfig) -> Any:
    """Return the configuration with its interpolations resolved, None where that fails."""
    try:
        return OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException:
        return None


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def compose(cfg: DictConfig) -> str | None:
    """Run one job that Hydra composed. Return why a sweep's job failed, else None."""
    sys.argv[1:] = map(without_address, sys.argv[1:])  # W&B records it
    register_resolvers()  # a launcher may have started this process
    from_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    in_sweep = from_sweep or is_job()
    if in_sweep:
        from lightning_rlhf.cli import sweep  # which imports models and figures

        if from_sweep:
            sweep.adapt(cfg, HydraConfig.get().overrides.task, SweepHook.varied)
        sweep.set_group(cfg)
    secrets = secrets_of(OmegaConf.to_container(cfg), resolved(cfg))

    def shown(text: str) -> str:
        return visible(without_secrets(text, secrets=list(secrets)))

    try:
        check_choices(HydraConfig.get().runtime.choices)
        if from_sweep and SweepHook.is_apart:
            from lightning_rlhf.cli.sweep_process import run_job

            return run_job(cfg, list(HydraConfig.get().overrides.task))
        with full_disk_told():
            execute(cfg, in_sweep)
    except (KeyboardInterrupt, Stopped) as stop:
        signum = stop.signum if isinstance(stop, Stopped) else signal.SIGINT
        if IN_RECIPE not in os.environ:
            print("; ".join(["stopped", *resume_hint(cfg, in_sweep)]))
        if from_sweep and SweepHook.is_apart and SweepHook.results is not None:
            SweepHook.results.end_early(signum)
            return STOPPED
        sys.exit(128 + signum)
    except RLHFError as error:
        if "debug" in cfg and cfg.debug is True:
            print(shown(traceback.format_exc()), file=sys.stderr, end="")
        is_cut_off = isinstance(error, RewardError | StorageError)
        hint = resume_hint(cfg, in_sweep) if is_cut_off else []
        message = shown(str(error))
        print_error("; ".join([message, *hint]))
        if in_sweep:
            message = sweep.mark_failed(cfg, message)
        if not from_sweep:
            sys.exit(1)
        return message
    except Exception as error:
        # Printed here, since Hydra would also print the overrides, with passwords in them.
        print(shown(traceback.format_exc()), file=sys.stderr, end="")
        message = shown(f"{type(error).__name__}: {error}")
        if in_sweep:
            message = sweep.mark_failed(cfg, message)
        if not from_sweep:
            sys.exit(1)
        return message
    return None


def resume_hint(cfg: DictConfig, in_sweep: bool) -> list[str]:
    """Return how to resume a stopped run; an empty list where there is nothing to resume."""
    from lightning_rlhf.callbacks.checkpoint_files import numbered
    from lightning_rlhf.stages.folder.folders import (
        CHECKPOINTS,
        FINAL,
        folder_of,
        is_unbegun,
        is_used,
    )
    from lightning_rlhf.stages.settings import read_settings
    from lightning_rlhf.stages.stage import AUTO

    if in_sweep or cfg.recipe is not None:
        return [f"the same command{', without overwrite=true,' * bool(cfg.overwrite)} goes on"]
    try:
        settings = read_settings(cfg)
        folder = folder_of(settings)
        if not is_used(folder) or (folder / FINAL).is_dir():
            return []
        if settings.resume == AUTO:
            return ["the same command goes on"]
        if numbered(folder / CHECKPOINTS):
            return ["resume=true goes on from the last checkpoint"]
        if is_unbegun(folder) or not settings.definition.trains:
            return ["the same command starts it over"]
    except RLHFError:
        return []
    every = f"{settings.stage}.checkpoint_every={settings.config.checkpoint_every}"
    return [f"it has no checkpoint yet ({every}), resume=auto starts it over"]


def refuse_processes(is_several_runs: bool, what: str) -> None:
    """Raise ConfigError where several processes would each run all jobs of a sweep or a recipe."""
    if is_several_runs and (place := world()).size > 1:
        raise ConfigError(
            f"{place.launcher} has started {place.size} processes, but {what} starts the processes "
            "of its jobs itself, by trainer.devices; allowed: one stage a command"
        )


def execute(cfg: DictConfig, in_sweep: bool) -> None:
    """Run the recipe, or the stage; a repeated sweep runs only the jobs that are not finished."""
    # As typed: indexing the list would resolve an interpolation.
    overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task)
    if OmegaConf.select(cfg, "recipe", throw_on_resolution_failure=False) is not None:
        if OmegaConf.select(cfg, "stage", throw_on_resolution_failure=False) is not None:
            raise ConfigError(f"recipe={cfg.recipe} runs its own stages; leave stage= out, or it")
        refuse_processes(True, "a recipe")
        from lightning_rlhf.cli.recipe import read_recipe, recipe_folder, run_recipe
        from lightning_rlhf.stages.settings import folder_names, plain

        folder_names(plain(cfg))
        folder = recipe_folder(cfg.recipe, RECIPES)
        recipe = read_recipe(folder)
        if recipe.program is None:
            run_recipe(recipe, cfg, overrides)
        else:
            from lightning_rlhf.cli.program import run_program  # which imports torch

            run_program(recipe, folder, cfg, overrides)
        return
    from lightning_rlhf.stages.registry import stage_names
    from lightning_rlhf.stages.settings import read_settings
    from lightning_rlhf.stages.stage import AUTO

    refuse_processes(in_sweep, "a sweep")
    unresolved: Any = OmegaConf.to_container(cfg)
    stage, names = (
        OmegaConf.select(cfg, "stage", throw_on_resolution_failure=False),
        stage_names(unresolved),
    )
    check_stage(stage, unresolved, HydraConfig.get().runtime.config_sources)
    if not in_sweep and stage in names:
        refuse_other_stages(stage, overrides, names)
    refuse_absent_callbacks(overrides)
    settings = read_settings(cfg)
    from lightning_rlhf.stages.folder.folders import state_of
    from lightning_rlhf.stages.start import check_run, run_stage

    if settings.preflight == "only":
        check_run(settings)
        return
    if in_sweep and not settings.overwrite:
        state = state_of(settings)
        if state == "done":
            return
        resume = (settings.resume or AUTO) if state == "cut off" else False
        settings = replace(settings, resume=resume, overwrite=state == "outdated")
    if settings.trainer.processes > 1 and settings.definition.trains and world().size == 1:
        from lightning_rlhf.cli.processes import run_processes

        run_processes(settings, overrides)
    else:
        run_stage(settings)
