"""The command: compose the configuration with Hydra, then run a stage or a recipe."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

import lightning_rlhf
from lightning_rlhf.core.errors import RLHFError

PACKAGE = Path(lightning_rlhf.__file__).parent
CHECKOUT = PACKAGE.parents[1]
HOME = CHECKOUT if (CHECKOUT / "conf" / "config.yaml").is_file() else PACKAGE
"""Where conf/ and recipes/ are: beside src/ in a checkout, inside the package in a wheel."""
CONF, RECIPES = HOME / "conf", HOME / "recipes"


def main() -> None:
    """Entry point of train.py and of the console command."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    register_resolvers()
    compose()


def register_resolvers() -> None:
    """`${recipes:path}` in the configuration is a path inside recipes/."""
    OmegaConf.register_new_resolver("recipes", lambda p: str(RECIPES / p), replace=True)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def compose(cfg: DictConfig) -> None:
    """One job: what Hydra composed from the command line."""
    from lightning_rlhf.cli.sweep import job_name, mark_failed

    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if in_sweep:
        with open_dict(cfg):
            cfg.job = job_name(HydraConfig.get().overrides.task)
    try:
        execute(cfg)
    except RLHFError as error:
        if cfg.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        if not in_sweep:
            sys.exit(1)
        mark_failed(cfg, error)
    except Exception as error:
        if not in_sweep:
            raise
        mark_failed(cfg, error)


def execute(cfg: DictConfig) -> None:
    """Run the recipe, or the stage."""
    if cfg.recipe is not None:
        from lightning_rlhf.cli.recipe import run_recipe

        run_recipe(cfg, HydraConfig.get().overrides.task, RECIPES)
        return
    from lightning_rlhf.cli.run import run_stage
    from lightning_rlhf.cli.settings import read_settings

    run_stage(read_settings(cfg))
