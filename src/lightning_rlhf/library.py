"""The front door of the library: configurations, and modules with their data, for any Trainer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf, open_dict

from lightning_rlhf.cli.main import register_resolvers
from lightning_rlhf.cli.messages import composition_error
from lightning_rlhf.cli.overrides import (
    check_choices,
    check_stage,
    parse_arguments,
    refuse_other_stages,
)
from lightning_rlhf.core.errors import ConfigError, RLHFError, require
from lightning_rlhf.stages.console import CONF
from lightning_rlhf.stages.folder.folders import claim
from lightning_rlhf.stages.folder.resume import resume_point
from lightning_rlhf.stages.registry import stage_names
from lightning_rlhf.stages.settings import read_settings
from lightning_rlhf.stages.stage import Settings
from lightning_rlhf.stages.start import check_inputs, require_buildable

if TYPE_CHECKING:
    from lightning_rlhf.modules.ppo import PPOModule
    from lightning_rlhf.stages.prepare import Training


def configuration(stage: str, *overrides: str, stages: Collection[str] = ()) -> Settings:
    """Return the checked configuration of a stage: the values of conf/ with some of them changed.

    Args:
        stage: name of the stage: "sft", "rm", "ppo", "dpo".
        overrides: words as on the command line: "model=tiny", "ppo.kl_coef=0.1".
        stages: names of stages that get the same overrides, as in a recipe: each reads its section.
            An override of the section of any other stage is refused.

    Raises:
        ConfigError: a key or a value is not one of those that are allowed, which the message names.
    """
    words = [*overrides, f"stage={stage}"]
    given = parse_arguments(words)
    register_resolvers()
    try:
        with no_outer_hydra(), initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("config", words, return_hydra_config=True)
            check_choices(cfg.hydra.runtime.choices)
            check_stage(stage, cfg, cfg.hydra.runtime.config_sources)
    except RLHFError:
        raise
    except Exception as error:  # Hydra and OmegaConf have no common class of errors
        raise ConfigError(composition_error(error, given)) from error
    with open_dict(cfg):
        del cfg["hydra"]
    require(cfg.recipe is None, "recipe", cfg.recipe, "none, since a recipe runs stages itself")
    names = stage_names(OmegaConf.to_container(cfg))  # type: ignore[arg-type]
    if stage in names:
        refuse_other_stages(stage, overrides, {*names} - {*stages})
    return read_settings(cfg)


@contextmanager
def no_outer_hydra() -> Iterator[None]:
    """Within the block, let Hydra start over in a program that uses Hydra itself."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def build(settings: Settings, module: type[PPOModule] | None = None) -> Training:
    """Return a stage before its first step, with `module` and `data` for `Trainer.fit`.

    Loads data and models as `python train.py` does, and reads what earlier stages of the run saved.
    The whole run is one epoch: `Trainer(max_epochs=1)`. Sets torch's number of threads on the CPU
    to `trainer.threads`, where the configuration has one, and its precision of fp32 products.
    Messages of libraries that need no action are silenced, as on the command line. For "rm" the SFT
    model first samples `rm.calibration_samples` responses, on which the reward's scale is measured.

    module: subclass of PPOModule for the stage "ppo", with another loss, reward or optimizer; None
        builds the stage's own module.

    Raises:
        RLHFError: data or models are missing or do not fit, or the run has been saved already.
    """
    import torch

    from lightning_rlhf.stages.accelerator import check_accelerator  # which imports torch
    from lightning_rlhf.stages.console import quiet_libraries

    prepare, resume = settings.definition.prepare, settings.resume
    require_buildable(settings, "built")
    assert prepare is not None
    require(not resume, "resume", resume, "false; give the checkpoint to Trainer.fit as ckpt_path")
    resume_point(settings)
    check_inputs(settings)
    quiet_libraries()
    check_accelerator(settings)
    torch.set_num_threads(settings.trainer.threads or torch.get_num_threads())
    torch.set_float32_matmul_precision(settings.trainer.matmul_precision)
    require(module is None or settings.stage == "ppo", "module", module,
            f"None for stage {settings.stage!r}, or a subclass of PPOModule for 'ppo'")  # fmt: skip
    classes = () if module is None else (module,)
    training: Training = prepare(settings, settings.config, *classes)
    return training


def save(training: Training, metrics: Mapping[str, float] | None = None) -> Path:
    """Write the trained model to `outputs/<run>/<model>/<stage>/final/`, and return that path.

    Later stages of the run start from it. With `overwrite=true` the folder of the stage is emptied
    first.

    Args:
        training: what `build` returned, after `Trainer.fit`.
        metrics: numbers for the manifest.

    Raises:
        ConfigError: the folder cannot be written.
    """
    claim(training.ready.settings, training.ready.parents)
    return training.save(metrics or {})
