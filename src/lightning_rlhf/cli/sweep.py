"""Names and folders of the jobs of a sweep, and the marks of those that failed."""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf.cli.overrides import TRIAL, key_of, parse_overrides
from lightning_rlhf.cli.recipe import read_recipe, recipe_folder
from lightning_rlhf.cli.recipe_steps import split_step
from lightning_rlhf.core.errors import ConfigError, RLHFError
from lightning_rlhf.stages import paths, ppo
from lightning_rlhf.stages.folder.changes import changes
from lightning_rlhf.stages.folder.folders import CONFIG, FINAL, folder_of, leave_failed, run_folder
from lightning_rlhf.stages.registry import chosen_stage
from lightning_rlhf.stages.settings import read_settings
from lightning_rlhf.stages.stage import Stage

IN_PATH = ("stage", "model", "run", "outputs", "recipe")
GROUP = "WANDB_RUN_GROUP"
"""Environment variable with which a user names the group of runs in W&B."""
LONGEST = 120
"""Maximum number of bytes of a job's name before its digest; file systems allow 255."""
FOREIGN, ODD = r"[^\w.+=,-]", r"[^\w.+-]"
"""Patterns of the characters that are not allowed in the name of a job's folder."""
NEUTRAL = ("resume", "overwrite", "debug", "samples", "logger", "callbacks", "trainer")


def adapt(cfg: DictConfig, overrides: Sequence[str], varied: Collection[str]) -> None:
    """Set the folder of a sweep's job.

    overrides: overrides of the job; varied: keys in which the jobs of the sweep differ.
    """
    whole = whole_name(overrides)
    is_whole = whole is not None and is_begun(cfg, whole)
    with open_dict(cfg):
        cfg.job = whole if is_whole else job_name(overrides, varied)
        if not is_whole and not cfg.overwrite and is_of_another(cfg):
            cfg.job = whole


def varied_keys(config: DictConfig) -> tuple[str, ...]:
    """Return the keys for which a sweep was given more than one value.

    config: Hydra's own configuration of the sweep.
    """
    given = parse_overrides(config.hydra.overrides.task)
    keys = [o.key_or_group for o in given if o.is_sweep_override()]
    params = config.hydra.sweeper.get("params") or {}
    return (*keys, *map(key_of, params))


def job_name(overrides: Sequence[str], varied: Collection[str]) -> str | None:
    """Return the name of a job's folder: the values of the keys that vary in the sweep.

    stage=ppo seed=1 ppo.kl_coef=0.1, both numbers varied -> kl_coef=0.1,seed=1. Values in the path
    are omitted; where nothing else varies, the name holds all overrides.
    """
    values = dict(part.split("=", 1) for part in _kept(overrides) if "=" in part)
    keys = sorted(key for key in values if key in varied)
    if not keys:
        return whole_name(overrides)
    ends = Counter(key.rpartition(".")[2] for key in keys)
    parts = []
    for key in keys:
        end = key.rpartition(".")[2]
        value = values[key].strip("'\"")
        parts.append(f"{end if ends[end] == 1 else key}={value}")
    return folder_name(",".join(parts), FOREIGN)


def whole_name(overrides: Sequence[str]) -> str | None:
    """Return the name that holds all overrides: ppo.kl_coef-0.1+seed-1.

    It is used where a folder of this name exists already, and where another sweep in the same run
    uses the short name.
    """
    return folder_name(re.sub(ODD, "-", "+".join(sorted(_kept(overrides)))), ODD)


def folder_name(text: str, foreign: str) -> str | None:
    """Return `text` as the name of a folder, None where it is empty.

    Characters that match `foreign` become "-". A digest of the text is appended to a name that was
    changed or cut, so that different texts have different names.
    """
    name = re.sub(foreign, "-", text).rstrip(".")
    if name != text or len(name.encode()) > LONGEST:
        start = name.encode()[:LONGEST].decode(errors="ignore")
        name = f"{start}-{zlib.crc32(text.encode()):08x}"
    return name or None


def _kept(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that change the results and are not part of the run's path."""
    kept = (o for o in without_trial(overrides) if key_of(o) not in (*IN_PATH, *NEUTRAL))
    return [override.lstrip("+~") for override in kept]


def without_trial(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a job without those with which it reports to a study."""
    return [word for word in overrides if not key_of(word).startswith(TRIAL)]


def set_group(cfg: DictConfig) -> None:
    """Make the jobs of a sweep one group of W&B, named after the run, unless the user named one."""
    logger: Any = cfg.get("logger") or {}
    if logger.get("kind") == "wandb" and logger.get("group") is None and not os.getenv(GROUP):
        logger.group = str(cfg.run)


def is_begun(cfg: DictConfig, job: str) -> bool:
    """Return whether a folder for the job exists."""
    try:
        parts = str(cfg.outputs), str(cfg.run), str(cfg.model.name), job
    except OmegaConfBaseException:  # the job itself reports it
        return False
    return Path(*parts).is_dir()


def is_of_another(cfg: DictConfig) -> bool:
    """Return whether the job's folder holds a run of another configuration."""
    try:
        settings = read_settings(cfg)
        file = folder_of(settings) / CONFIG
        return file.is_file() and bool(changes(settings.definition, settings.tree, file))
    except RLHFError:  # the job itself reports it
        return False


def mark_failed(cfg: DictConfig, reason: str) -> str:
    """Write the reason to the job's folder unless it holds a finished run; return the reason."""
    if not isinstance(cfg.outputs, str):
        return reason
    folder = job_folder(cfg)
    is_inside = Path(os.path.abspath(folder)).is_relative_to(os.path.abspath(cfg.outputs))
    if is_inside and not (folder / FINAL).is_dir():
        leave_failed(folder, reason)
    return reason


def job_folder(cfg: DictConfig) -> Path:
    """Return the folder that the job writes to; for a whole recipe that of its last stage."""
    stage, inner = last_step(cfg)
    job = "/".join(str(part) for part in (cfg.job, inner) if part is not None) or None
    return run_folder(Path(cfg.outputs), str(cfg.run), str(cfg.model.name), stage, job)


def job_stage(cfg: DictConfig) -> Stage:
    """Return the stage of a job; for a whole recipe the last stage."""
    tree: Any = OmegaConf.to_container(cfg)
    return chosen_stage(tree | {"stage": last_step(cfg)[0]})


def last_step(cfg: DictConfig) -> tuple[str, str | None]:
    """Return the stage of a job; for a whole recipe the stage of its last step, and its own job.

    A recipe that is a program, or that is not known, has the stage `ppo`.
    """
    recipe = OmegaConf.select(cfg, "recipe", throw_on_resolution_failure=False)
    if cfg.stage is not None or recipe is None:
        return cfg.stage or ppo.STAGE.name, None
    try:
        stages = read_recipe(recipe_folder(recipe, paths.RECIPES)).stages
    except ConfigError:  # the job itself reports it
        stages = ()
    return split_step(stages[-1]) if stages else (ppo.STAGE.name, None)
