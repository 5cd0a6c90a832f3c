"""Turns Hydra's configuration into frozen dataclasses, before any model loads."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf.callbacks.logger_config import Kind, LoggerConfig, logger_config
from lightning_rlhf.core.errors import ConfigError, first_line, naming_own_keys, require
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.validation import Seed, Text, build, check_value, described, refuse_unknown
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.models.config import ModelConfig
from lightning_rlhf.stages.registry import DEFINITION, chosen_stage, stage_names
from lightning_rlhf.stages.stage import (
    AUTO,
    PolicySource,
    PreflightMode,
    Settings,
    Stage,
    check_components,
    check_normalization,
    read_reward,
    redacted_section,
    section,
)
from lightning_rlhf.stages.trainer_section import read_trainer, resolve_auto

EXAMPLES = {
    "reward.path": "rules.py:score",
    "reward.url": "http://127.0.0.1:8000/score",
}
"""Key of a value that must be given -> example of such a value."""
FOLDER_NAME = (
    "a folder name of characters that can be seen, without slashes and line breaks, which begins "
    "with a letter or digit and does not end with a dot or space"
)
FolderName = Annotated[Text, described("a folder name of at most 255 bytes, no line breaks")]
OBJECTS = ("callbacks", "plugins", "profiler", "strategy")
"""Keys of `trainer` whose values may be objects with arguments of their own."""
KEYS = {f.name for f in dataclasses.fields(Settings)} - {
    "config",
    "custom_logger",
    "definition",
    "tree",
}
"""Top-level keys of a configuration besides the section of its stage, `recipe` and `final`."""


def read_settings(cfg: DictConfig) -> Settings:
    """Check the composed configuration. Raises ConfigError naming the key.

    In its tree, callbacks and loggers keep their interpolations: what `${oc.env:KEY}` stands for is
    written to no file and no tracker.
    """
    unresolved: Any = OmegaConf.to_container(cfg)
    check_components(unresolved)
    settings = read_tree(plain(cfg))
    tree = {**settings.tree, **{key: unresolved[key] for key in ("callbacks", "logger")}}
    tree["trainer"] = {
        key: unresolved["trainer"][key] if key in OBJECTS else value
        for key, value in tree["trainer"].items()
    }
    return replace(settings, tree=tree)


def read_tree(tree: dict[str, Any]) -> Settings:
    """Check a configuration of plain types, as a run writes it.

    Sections of stages that it does not choose are ignored.
    Raises ConfigError naming the key.
    """
    definition = chosen_stage(tree)
    stage, others = definition.name, {*stage_names(tree)} - {definition.name}
    tree = {key: node for key, node in tree.items() if key not in others}
    refuse_unknown(tree, KEYS | {"recipe", "final", stage}, "")
    for key in (*KEYS, stage):
        require(key in tree, key, "missing", "a value; it was taken out of the configuration")
    check_value("seed", tree["seed"], Seed)
    for key in ("overwrite", "record", "debug", "samples"):
        check_value(key, tree[key], bool)
    if tree["preflight"] is False:
        tree["preflight"] = "off"  # which is false in a YAML file
    check_value("preflight", tree["preflight"], PreflightMode)
    tree["resume"] = read_resume(tree["resume"])
    tree |= folder_names(tree)
    tree = resolve_auto(tree)
    check_value("outputs", tree["outputs"], Annotated[Text, described("a folder")])
    if tree["resume"] and tree["overwrite"]:
        given = "true" if tree["resume"] is True else tree["resume"]
        raise ConfigError(f"resume={given} and overwrite=true exclude each other; give one of them")
    reward = read_reward(tree["reward"])
    with naming_own_keys(stage, {f.name for f in fields(definition.config)}):
        config = _config(definition, tree[stage])
        if isinstance(config, PPOConfig):
            check_normalization(config, reward)
    tree["reward"] = redacted_section(tree["reward"])
    return Settings(
        stage=stage,
        definition=definition,
        config=config,
        model=build(ModelConfig, section(tree, "model"), "model"),
        data=build(DataConfig, tree["data"], "data"),
        reward=reward,
        trainer=read_trainer(tree["trainer"]),
        logger=_logger(tree),
        custom_logger=own_logger(tree),
        callbacks=section(tree, "callbacks"),
        policy=build(PolicySource, tree["policy"], "policy"),
        run=tree["run"],
        job=tree["job"],
        seed=tree["seed"],
        outputs=Path(os.path.expanduser(tree["outputs"])),
        resume=tree["resume"],
        overwrite=tree["overwrite"],
        preflight=tree["preflight"],
        record=tree["record"],
        debug=tree["debug"],
        samples=tree["samples"],
        tree=tree,
    )


def folder_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections that name a folder of the run, with their names as text.

    Raises ConfigError where a name is not printable or not valid on every file system.
    """
    model = section(tree, "model", "name")
    names = {"run": tree["run"], "model.name": model["name"]}
    if tree["job"] is not None:
        names["job"] = tree["job"]
    for key, name in names.items():
        is_word = isinstance(name, str | int) and not isinstance(name, bool)
        is_other = isinstance(name, bool | float)
        require(not is_other, key, name, f"text; quote what reads as no text: \"{key}='NAME'\"")
        is_name = is_word and re.fullmatch(r"\w[^/\\]*(?<![. ])", str(name)) is not None
        require(is_name and str(name).isprintable(), key, name, FOLDER_NAME)
        check_value(key, str(name), FolderName)
        stages = stage_names(tree)
        require(name not in stages, key, name, f"a name other than {', '.join(stages)}")
    model_name = str(names.pop("model.name"))
    texts = {key: str(name) for key, name in names.items()}
    return {**texts, "model": {**model, "name": model_name}}


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return the configuration resolved, as plain types, without sections of other stages.

    Raises ConfigError where a value is missing or cannot be resolved.
    """
    try:
        unresolved: Any = OmegaConf.to_container(cfg)
        others = {*stage_names(unresolved)} - {OmegaConf.select(cfg, "stage")}
        keys = [str(key) for key in cfg if key not in others]
        nodes = {key: cfg[key] for key in keys if not OmegaConf.is_missing(cfg, key)}
        missing = set(keys) - set(nodes)
        for node in filter(OmegaConf.is_config, nodes.values()):
            missing |= OmegaConf.missing_keys(node)
        if missing:
            given = {**dict.fromkeys(sorted(missing), "..."), **EXAMPLES}
            choices = " ".join(f"{key}={given[key]}" for key in sorted(missing))
            raise ConfigError(f"{' and '.join(sorted(missing))} must be given: {choices}")
        return {
            key: OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
            for key, node in nodes.items()
        }
    except OmegaConfBaseException as error:
        key = error.full_key or "a key"
        raise ConfigError(f"{key} has no value: {first_line(error)}") from error


def read_resume(given: Any) -> bool | str:
    """Return whether to resume, AUTO, or the name of a checkpoint: "000010" for 10."""
    if isinstance(given, bool) or given == AUTO:
        return given  # type: ignore[no-any-return]
    name = str(given)
    is_name = isinstance(given, int | str) and re.fullmatch(r"[0-9]+|best", name) is not None
    require(is_name, "resume", given, "true, false, auto, the step of a checkpoint, best")
    return name if name == "best" else f"{int(name):06d}"


def _config(stage: Stage, node: Any) -> Any:
    """Return the section of a stage as its dataclass, without the key `definition`."""
    if isinstance(node, Mapping):
        node = {key: value for key, value in node.items() if key != DEFINITION}
        if issubclass(stage.config, PPOConfig) and "advantage" not in node:
            raise ConfigError(
                f"{stage.name}.advantage is missing, with all keys that an estimator of advantages "
                f"sets; add +advantage@{stage.name}=gae, or `/advantage@_here_: gae` to the "
                f"defaults of stages/{stage.name}.yaml"
            )
    return build(stage.config, node, stage.name)


def own_logger(tree: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the section of a logger of the user's own, None where it names a shipped one.

    `kind=csv` may stand beside `_target_`, since metrics.csv is always written.
    """
    node = section(tree, "logger")
    if "_target_" not in node:
        return None
    if "kind" not in node or node["kind"] not in get_args(Kind):
        return node
    require(node["kind"] == "csv", "logger.kind", node["kind"], "csv beside logger._target_")
    return {key: value for key, value in node.items() if key != "kind"}


def _logger(tree: Mapping[str, Any]) -> LoggerConfig:
    """Return the section `logger`; with a user's own logger, metrics.csv is written too."""
    node = section(tree, "logger")
    if "_target_" in node:
        return LoggerConfig(kind="csv")
    return logger_config(section(tree, "logger", "kind"))
