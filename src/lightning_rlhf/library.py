"""The interface of the library: configurations, and modules with their data, for any Trainer."""

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from lightning_rlhf.cli import arguments, main
from lightning_rlhf.core.errors import ConfigError, require
from lightning_rlhf.data.batches import StageData
from lightning_rlhf.runs import accelerator, console
from lightning_rlhf.runs.resume import decide
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.settings import read_settings
from lightning_rlhf.runs.stage import Settings, Stage, stage_names
from lightning_rlhf.stages import fit


def configuration(stage: str, *overrides: str, stages: Collection[str] = ()) -> Settings:
    """Return the checked configuration of a stage: the values of conf/ with some of them changed.

    Args:
        stage: name of the stage: "sft", "rm", "ppo", "dpo".
        overrides: words as on the command line: "model=tiny", "ppo.kl_coef=0.1".
        stages: names of stages that get the same overrides, as in a recipe: each reads its section.
            An override of the section of any other stage is refused.

    Raises ConfigError where a key or a value is not one of those that are allowed, which the
    message names.
    """
    words = [*overrides, f"stage={stage}"]
    main.register_resolvers()
    outer = GlobalHydra.instance().hydra  # of a program that uses Hydra itself
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(console.CONF), version_base="1.3"):
            cfg = compose("config", words)
    except Exception as error:  # Hydra and OmegaConf have no common class of errors
        raise ConfigError(arguments.composition_error(error, words)) from error
    finally:
        GlobalHydra.instance().hydra = outer
    require(cfg.recipe is None, "recipe", cfg.recipe, "none, since a recipe runs stages itself")
    names = stage_names(OmegaConf.to_container(cfg))  # type: ignore[arg-type]
    if stage in names:
        arguments.refuse_other_stages(stage, overrides, {*names} - {*stages})
    return read_settings(cfg)


@dataclass(frozen=True)
class Training:
    """A stage before its first step, for `Trainer.fit(training.module, training.data)`."""

    stage: Stage
    run: Run
    module: L.LightningModule
    data: StageData


def build(settings: Settings, module: type[L.LightningModule] | None = None) -> Training:
    """Return a stage before its first step, with `module` and `data` for `Trainer.fit`.

    Loads data and models as `python train.py` does, and reads what earlier stages of the run saved.
    The whole run is one epoch: `Trainer(max_epochs=1)`. Sets torch's number of threads on the CPU
    to `trainer.threads`, where the configuration has one, and its precision of fp32 products.
    Messages of libraries that need no action are silenced, as on the command line. For "rm" the SFT
    model first samples `rm.calibration_samples` responses, on which the reward's scale is measured.

    Args:
        settings: what `configuration` returned.
        module: class of the module, derived from that of the stage; None is that of the stage.

    Raises RLHFError where data or models are missing or do not fit, or the run has been saved
    already.
    """
    resume, stage = settings.resume, copy(settings.definition)
    fit.require_trained(stage, "built")
    require(not resume, "resume", resume, "false; give the checkpoint to Trainer.fit as ckpt_path")
    decide(settings)
    accelerator.quiet_libraries()
    accelerator.check_devices(settings)
    torch.set_num_threads(settings.trainer.threads or torch.get_num_threads())
    torch.set_float32_matmul_precision(settings.trainer.matmul_precision)
    run = Run.of(settings)
    if module is not None:
        stage.module_class = module  # type: ignore[attr-defined]
    built, data, _ = fit.build(stage, run)
    return Training(stage, run, built, data)


def save(training: Training, metrics: Mapping[str, float] | None = None) -> Path:
    """Write the trained model to `outputs/<run>/<model>/<stage>/final/`, and return that path.

    Later stages of the run start from it. With `overwrite=true` the folder of the stage is emptied
    first.

    Args:
        training: what `build` returned, after `Trainer.fit`.
        metrics: numbers for the manifest.

    Raises ConfigError where the folder cannot be written.
    """
    training.run.create()
    return training.stage.finish(training.run, training.module, metrics or {})
