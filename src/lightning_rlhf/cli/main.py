"""The command: compose the configuration with Hydra, then run a stage or a recipe."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import lightning_rlhf
from lightning_rlhf.callbacks.stop import Stopped
from lightning_rlhf.cli.names import as_typed, check_choices, opened, parted, program_name
from lightning_rlhf.cli.process import IN_RECIPE
from lightning_rlhf.cli.secrecy import (
    refuse_secrets,
    secrets_of,
    without_address,
    without_printed,
    without_secrets,
)
from lightning_rlhf.cli.sweep_hook import SweepHook
from lightning_rlhf.core.errors import ConfigError, RewardError, RLHFError, StorageError
from lightning_rlhf.core.storage import full_disk_told
from lightning_rlhf.core.visible import visible
from lightning_rlhf.stages.console import say_error
from lightning_rlhf.stages.paths import CONF, RECIPES

PRINTS = re.compile(r"-[cih](?![npd])|--(cf|i|h)")
"""Beginnings of the options with which Hydra prints and runs nothing: --cfg, --info, --help."""


def main() -> None:
    """Entry point of train.py and of the console command."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if sys.argv[1:] == ["--version"]:
        print(f"lightning-rlhf {lightning_rlhf.__version__}")
        return
    if sys.argv[1:2] == ["serve-reward"]:
        from lightning_rlhf.cli.serve import serve_reward

        gc.enable()
        serve_reward(sys.argv[2:])
        return
    if sys.argv[1:2] == ["replay"]:
        from lightning_rlhf.cli.replay import replay

        gc.enable()
        replay(sys.argv[2:])
        return
    register_resolvers()
    # A stage's numbers may be given where the stage is not chosen yet: to a recipe, or to a sweep
    # over stages. So may arguments to a reward's function, which the configuration cannot know.
    # Hydra wants ++ for keys that are not there; unknown ones are refused later, with a hint.
    given = sys.argv[1:]
    overrides, options = parted(given)
    sys.argv[1:] = [*map(opened, overrides), *options]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # what Hydra refuses is said here, in one line
    try:
        refuse_secrets(given)
        with printed_safely(sys.argv[1:]):
            compose()
    except RLHFError as error:
        say_error(str(error))
        sys.exit(1)
    except Exception as error:
        from lightning_rlhf.cli.refusals import in_our_words

        given = sys.argv[1:]
        if "debug=true" in given:
            print(visible(without_secrets(traceback.format_exc(), given)), file=sys.stderr)
        say_error(in_our_words(error, given))
        sys.exit(1)


@contextlib.contextmanager
def printed_safely(words: list[str]) -> Iterator[None]:
    """Print what Hydra prints of the configuration without secrets, and as it was typed."""
    if not any(PRINTS.match(word) for word in words):
        yield
        return
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        print(visible(as_typed(without_printed(printed.getvalue(), words))), end="")


def register_resolvers() -> None:
    """Register `${recipes:path}`, a path inside recipes/, and `${program:}`, the command's name."""
    OmegaConf.register_new_resolver("program", program_name, replace=True)
    OmegaConf.register_new_resolver("recipes", lambda p: str(RECIPES / p), replace=True)


def resolved(cfg: DictConfig) -> Any:
    """With what its interpolations stand for; None where one of them stands for nothing."""
    try:
        return OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException:
        return None


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def compose(cfg: DictConfig) -> str | None:
    """One job: what Hydra composed from the command line. Returns why a sweep's job failed."""
    sys.argv[1:] = [as_typed(without_address(word)) for word in sys.argv[1:]]  # W&B writes it down
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if in_sweep:
        from lightning_rlhf.cli import sweep  # which imports models and figures

        sweep.adapt(cfg, HydraConfig.get().overrides.task, SweepHook.varied)
    secrets = secrets_of(OmegaConf.to_container(cfg), resolved(cfg))

    def shown(text: str) -> str:
        return visible(without_secrets(text, secrets=list(secrets)))

    try:
        check_choices(HydraConfig.get().runtime.choices)
        with full_disk_told():
            execute(cfg, in_sweep)
    except (KeyboardInterrupt, Stopped) as stop:
        if IN_RECIPE not in os.environ:
            print("; ".join(["stopped", *way_on(cfg, in_sweep)]))
        sys.exit(stop.code if isinstance(stop, Stopped) else 128 + signal.SIGINT)
    except RLHFError as error:
        if "debug" in cfg and cfg.debug is True:
            print(shown(traceback.format_exc()), file=sys.stderr, end="")
        is_cut_off = isinstance(error, RewardError | StorageError)
        on = way_on(cfg, in_sweep) if is_cut_off else []
        told = shown(str(error))
        say_error("; ".join([told, *on]))
        if not in_sweep:
            sys.exit(1)
        return sweep.mark_failed(cfg, told)
    except Exception as error:
        # Not left to Hydra, which would show the overrides as well, passwords among them.
        print(shown(traceback.format_exc()), file=sys.stderr, end="")
        if not in_sweep:
            sys.exit(1)
        return sweep.mark_failed(cfg, shown(f"{type(error).__name__}: {error}"))
    return None


def way_on(cfg: DictConfig, in_sweep: bool) -> list[str]:
    """How to go on with what was stopped; nothing where the command had not come that far."""
    from lightning_rlhf.callbacks.checkpoint_files import numbered
    from lightning_rlhf.core.config import EvalConfig
    from lightning_rlhf.stages.folders import CHECKPOINTS, FINAL, folder_of, is_unbegun, is_used
    from lightning_rlhf.stages.settings import AUTO, read_settings

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
        if is_unbegun(folder) or isinstance(settings.config, EvalConfig):
            return ["the same command starts it anew"]
    except RLHFError:
        return []
    every = f"{settings.stage}.checkpoint_every={settings.config.checkpoint_every}"
    return [f"it has no checkpoint yet ({every}), resume=auto starts it anew"]


def execute(cfg: DictConfig, in_sweep: bool) -> None:
    """Run the recipe, or the stage; a sweep that is called again does what is not done yet."""
    if cfg.recipe is not None:
        from lightning_rlhf.cli.recipe import read_recipe, run_recipe

        if "stage" in cfg:
            raise ConfigError(f"recipe={cfg.recipe} runs its own stages; leave stage= out, or it")
        gc.enable()
        from lightning_rlhf.stages.settings import folder_names, plain

        folder_names(plain(cfg))
        recipe, overrides = read_recipe(cfg.recipe, RECIPES), HydraConfig.get().overrides.task
        if recipe.program is None:
            run_recipe(recipe, cfg, overrides)
        else:
            from lightning_rlhf.cli.program import run_program  # which imports torch

            run_program(recipe, RECIPES / cfg.recipe, cfg, overrides)
        return
    from lightning_rlhf.stages.settings import AUTO, read_settings

    settings = read_settings(cfg)
    gc.enable()
    from lightning_rlhf.stages.folders import state_of
    from lightning_rlhf.stages.start import run_stage

    if in_sweep and not settings.overwrite:
        state = state_of(settings)
        if state == "done":
            return
        resume = (settings.resume or AUTO) if state == "cut off" else False
        settings = replace(settings, resume=resume, overwrite=state == "outdated")
    run_stage(settings)
