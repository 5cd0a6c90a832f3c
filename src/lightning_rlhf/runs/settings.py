"""Turns Hydra's configuration into frozen dataclasses, before any model loads."""

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field

from lightning_rlhf.callbacks.files import Kind, LoggerConfig, logger_config
from lightning_rlhf.core.config import PPOConfig
from lightning_rlhf.core.errors import ConfigError, first_line, naming_own_keys, require
from lightning_rlhf.core.validation import (
    Count,
    Seed,
    Text,
    build,
    check_value,
    described,
    refuse_unknown,
)
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.models.config import ModelConfig
from lightning_rlhf.rewards import config as rewards
from lightning_rlhf.rewards.config import ComponentConfig, redacted
from lightning_rlhf.runs.stage import (
    AUTO,
    DEFINITION,
    SUM,
    PolicySource,
    PreflightMode,
    Settings,
    TrainerConfig,
    chosen_stage,
    section,
    stage_names,
)

EXAMPLES = {
    "reward.path": "rules.py:score",
    "reward.url": "http://127.0.0.1:8000/score",
}
"""Key of a value that must be given -> example of such a value."""
FOLDER_NAME = (
    "a folder name of characters that can be seen, without slashes and line breaks, which begins "
    "with a letter or digit and does not end with a dot or space"
)
NAME = r"\w[^/\\]*(?<![. ])"
FolderName = Annotated[Text, described("a folder name of at most 255 bytes, no line breaks")]
OBJECTS = ("callbacks", "plugins", "profiler", "strategy")
"""Keys of `trainer` whose values may be objects with arguments of their own."""
TYPES: Mapping[str, Any] = {
    "seed": Seed,
    "preflight": PreflightMode,
    "outputs": Annotated[Text, described("a folder")],
    **dict.fromkeys(("overwrite", "record", "debug", "samples"), bool),
}
"""Top-level key of one value -> type of the value."""
KEYS = {f.name for f in dataclasses.fields(Settings)} - {"config", "custom_logger", "find", "tree"}
"""Top-level keys of a configuration besides the section of its stage, `recipe` and `final`."""
GPU = {"precision": "bf16-mixed", "weights_dtype": "bfloat16"}
CPU = {"precision": "32-true", "weights_dtype": "float32"}
"""Values of the keys set to auto, on a GPU and on the CPU."""
PASSED: Mapping[str, Any] = {
    **dict.fromkeys(("callbacks", "max_time", "plugins", "profiler", "strategy"), Any),
    **dict.fromkeys(("benchmark", "enable_model_summary", "enable_progress_bar"), bool | None),
    "detect_anomaly": bool,
    "deterministic": Annotated[bool | Literal["warn"] | None, described("true, false, warn, null")],
    "limit_val_batches": Annotated[
        Count | Annotated[float, Field(gt=0, le=1)],
        described("a whole number >= 1, or a share up to 1.0: evaluations tell the best step"),
    ],
}
"""Arguments of lightning.Trainer that are passed on unchanged -> type; Lightning checks Any."""
STRATEGIES = (AUTO, "single_device")
"""Strategies of Lightning, by name, with which a run computes."""
_LENGTH = "a run is one epoch: sft.epochs, rm.epochs or ppo.iterations say how long it is"
_RHYTHM = "val_every in the section of the stage says when a run evaluates"
_LOOP = "a run trains and evaluates on all of its data, in an order that it resumes"
OWNED: Mapping[str, str] = {
    "accumulate_grad_batches": "microbatch_size in the section of the stage splits a batch",
    "barebones": "a run writes metrics and checkpoints",
    "check_val_every_n_epoch": _RHYTHM,
    "default_root_dir": "outputs, run and job name the folder of a run",
    "enable_autolog_hparams": "config.json in the run's folder holds the configuration",
    "enable_checkpointing": "checkpoint_every in the section of the stage says when a run is saved",
    "fast_dev_run": "ppo.iterations=1, or a small sft.epochs or rm.epochs, is a short run",
    "gradient_clip_algorithm": "max_grad_norm in the section of the stage clips the norm",
    "gradient_clip_val": "max_grad_norm in the section of the stage clips the gradient",
    "inference_mode": "evaluations take what they need",
    "limit_predict_batches": _LOOP,
    "limit_test_batches": _LOOP,
    "limit_train_batches": _LENGTH,
    "logger": "the group logger says where metrics go",
    "max_epochs": _LENGTH,
    "max_steps": _LENGTH,
    "min_epochs": _LENGTH,
    "min_steps": _LENGTH,
    "model_registry": "checkpoints are files in the run's folder",
    "num_sanity_val_steps": _RHYTHM,
    "overfit_batches": _LOOP,
    "reload_dataloaders_every_n_epochs": _LOOP,
    "sync_batchnorm": _LOOP,
    "use_distributed_sampler": _LOOP,
    "val_check_interval": _RHYTHM,
}
"""Arguments of lightning.Trainer that a stage sets itself -> what to use instead."""


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
    stage, config_class, find = chosen_stage(tree)
    others = {*stage_names(tree)} - {stage}
    tree = {key: node for key, node in tree.items() if key not in others}
    refuse_unknown(tree, KEYS | {"recipe", "final", stage}, "")
    for key in (*KEYS, stage):
        require(key in tree, key, "missing", "a value; it was taken out of the configuration")
    if tree["preflight"] is False:
        tree["preflight"] = "off"  # which is false in a YAML file
    for key, kind in TYPES.items():
        check_value(key, tree[key], kind)
    tree["resume"] = read_resume(tree["resume"])
    if tree["resume"] and tree["overwrite"]:
        given = "true" if tree["resume"] is True else tree["resume"]
        raise ConfigError(f"resume={given} and overwrite=true exclude each other; give one of them")
    tree = resolve_auto(tree | folder_names(tree))
    reward = read_reward(tree["reward"])
    with naming_own_keys(stage, {f.name for f in fields(config_class)}):
        config = stage_config(stage, config_class, tree[stage])
        own = [name for name, x in reward.items() if x.normalization == "running" or x.clip]
        if isinstance(config, PPOConfig) and own and config.score_normalization != "none":
            raise ConfigError(
                f"ppo.score_normalization is {config.score_normalization!r} and the reward "
                f"{own[0]!r} is normalised by running moments or clipped already; allowed: one of "
                "the two, with ppo.score_normalization=none or normalization=none and clip=null"
            )
    tree["reward"] = redacted_section(tree["reward"])
    logger, custom_logger = read_logger(tree)
    return Settings(
        stage=stage,
        find=find,
        config=config,
        model=build(ModelConfig, section(tree, "model"), "model"),
        data=build(DataConfig, tree["data"], "data"),
        reward=reward,
        trainer=read_trainer(tree["trainer"]),
        logger=logger,
        custom_logger=custom_logger,
        callbacks=section(tree, "callbacks"),
        policy=build(PolicySource, tree["policy"], "policy"),
        outputs=Path(os.path.expanduser(tree["outputs"])),
        tree=tree,
        **{key: tree[key] for key in ("run", "job", "resume", *TYPES) if key != "outputs"},
    )


def folder_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections that name a folder of the run, with their names as text.

    Raises ConfigError where a name is not printable or not valid on every file system.
    """
    model, stages = section(tree, "model", "name"), stage_names(tree)
    for key, name in {"run": tree["run"], "model.name": model["name"], "job": tree["job"]}.items():
        if key == "job" and name is None:
            continue
        is_other = isinstance(name, bool | float)
        require(not is_other, key, name, f"text; quote what reads as no text: \"{key}='NAME'\"")
        is_name = isinstance(name, str | int) and re.fullmatch(NAME, str(name)) is not None
        require(is_name and str(name).isprintable(), key, name, FOLDER_NAME)
        check_value(key, str(name), FolderName)
        require(name not in stages, key, name, f"a name other than {', '.join(stages)}")
    job = None if tree["job"] is None else str(tree["job"])
    return {"run": str(tree["run"]), "job": job, "model": {**model, "name": str(model["name"])}}


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return the configuration resolved, as plain types, without sections of other stages.

    Raises ConfigError where a value is missing or cannot be resolved.
    """
    try:
        unresolved: Any = OmegaConf.to_container(cfg)
        stage = OmegaConf.select(cfg, "stage")
        allowed = "the name of one stage; -m stage=A,B runs several"
        require(not OmegaConf.is_config(stage), "stage", stage, allowed)
        others = {*stage_names(unresolved)} - {stage}
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


def stage_config(stage: str, kind: type, node: Any) -> Any:
    """Return the section of a stage as its dataclass, without the key `definition`."""
    if isinstance(node, Mapping):
        node = {key: value for key, value in node.items() if key != DEFINITION}
        if issubclass(kind, PPOConfig) and "advantage" not in node:
            raise ConfigError(
                f"{stage}.advantage is missing, with all keys that an estimator of advantages "
                f"sets; add +advantage@{stage}=gae, or `/advantage@_here_: gae` to the defaults "
                f"of stages/{stage}.yaml"
            )
    return build(kind, node, stage)


def read_logger(tree: Mapping[str, Any]) -> tuple[LoggerConfig, Mapping[str, Any] | None]:
    """Return the section `logger`, and that of a logger of the user's own, or None.

    With one of the user's own metrics.csv is written too: `kind=csv` may stand beside `_target_`.
    """
    node = section(tree, "logger")
    if "_target_" not in node:
        return logger_config(section(tree, "logger", "kind")), None
    if "kind" in node and node["kind"] in get_args(Kind):
        require(node["kind"] == "csv", "logger.kind", node["kind"], "csv beside logger._target_")
        node = {key: value for key, value in node.items() if key != "kind"}
    return LoggerConfig(kind="csv"), node


REWARDS: Mapping[str, type[ComponentConfig]] = {
    "function": rewards.FunctionConfig,
    "head": rewards.HeadConfig,
    "http": rewards.HTTPConfig,
    "model": rewards.TextModelConfig,
    "random": rewards.RandomConfig,
}
"""Kind of a component of the reward -> class of its configuration."""


def read_reward(node: Any) -> dict[str, ComponentConfig]:
    """Return the components of the section `reward` by name; a single one is named by its kind."""
    kind = section({"reward": node}, "reward", "kind")["kind"]
    require(kind in [*REWARDS, SUM], "reward.kind", kind, ", ".join((*REWARDS, SUM)))
    parts, key = {kind: node}, "reward"
    if kind == SUM:
        parts, key = node.get("components"), "reward.components.{}"
        refuse_unknown(node, {"kind", "components"}, "reward.")
        require(isinstance(parts, Mapping) and bool(parts), "reward.components", parts,
                "one or more rewards by name: +reward@reward.components.NAME=KIND")  # fmt: skip
    reward, kinds = {}, ", ".join(REWARDS)
    for name, part in parts.items():
        is_name = re.fullmatch(r"[A-Za-z]\w*", str(name)) is not None
        require(
            is_name, "a name in reward.components", name, "letters, digits and _, a letter first"
        )
        own = key.format(name)
        require(isinstance(part, Mapping), own, part, "a mapping of keys to values")
        require("kind" in part, f"{own}.kind", "missing", kinds)
        require(part["kind"] in list(REWARDS), f"{own}.kind", part["kind"], kinds)
        reward[str(name)] = build(REWARDS[part["kind"]], part, own)
        reward[str(name)].check(own)
    if all(component.weight == 0 for component in reward.values()):
        raise ConfigError("every weight of reward is 0; allowed: one or more that are not")
    return reward


def check_components(tree: Any) -> None:
    """Raise ConfigError where keys are given for a component of a sum that was not added to it.

    tree: configuration; values may be missing, as after a misspelt name.
    """
    reward = tree.get("reward") if isinstance(tree, Mapping) else None
    given = reward.get("components") if isinstance(reward, Mapping) else None
    nodes = given.items() if isinstance(given, Mapping) else ()
    parts = {str(name): part for name, part in nodes if isinstance(part, Mapping)}
    whole = [name for name, part in parts.items() if {"kind", "weight"} <= part.keys()]
    for name in parts.keys() - set(whole):
        kind = parts[name].get("kind", "KIND")
        close = difflib.get_close_matches(name, whole, n=1) if kind == "KIND" else []
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"there is no component {name!r} in reward.components; {hint}"
            f"+reward@reward.components.{name}={kind} puts one there, with all its keys"
        )


def redacted_section(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `reward` with users, passwords and queries removed from its URLs."""
    shown = dict(node)
    if "url" in shown:
        shown["url"] = redacted(shown["url"])
    if "components" in shown:
        parts = shown["components"].items()
        shown["components"] = {name: redacted_section(part) for name, part in parts}
    return shown


def read_trainer(node: Any) -> TrainerConfig:
    """Return the section, checked. Raises ConfigError naming the key."""
    node = section({"trainer": node}, "trainer")
    for key, reason in OWNED.items():
        if key in node:
            raise ConfigError(f"trainer.{key} is {node[key]!r}, but it is not to be set: {reason}")
    ours = {key for key in TrainerConfig.__dataclass_fields__ if key != "options"}
    refuse_unknown(node, {*ours, *PASSED, "_target_"}, "trainer.")
    is_named = "strategy" in node and isinstance(node["strategy"], str)
    if is_named and node["strategy"] not in STRATEGIES:
        raise ConfigError(
            f"trainer.strategy is {node['strategy']!r}, but the processes of a run "
            f"(trainer.devices, trainer.num_nodes) sum their gradients themselves; allowed: "
            f"{', '.join(STRATEGIES)}"
        )
    for key, kind in PASSED.items():
        if key in node:
            check_value(f"trainer.{key}", node[key], kind)
    options = {key: value for key, value in node.items() if key not in ours}
    mine = {key: value for key, value in node.items() if key in ours}
    mine["options"] = {"_target_": "lightning.Trainer", **options}
    return build(TrainerConfig, mine, "trainer")


def resolve_auto(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration in which trainer=auto is replaced by settings for this machine.

    A GPU that torch can use gets bf16-mixed with frozen weights in bfloat16; else the CPU is used
    in float32. A model with random weights (model.from_config) is small and stays on the CPU.
    """
    trainer, model = tree["trainer"], tree["model"]
    if not isinstance(trainer, Mapping) or not isinstance(model, Mapping):
        return tree
    trainer, model = dict(trainer), dict(model)
    if trainer.get("accelerator") == AUTO:
        trainer["accelerator"] = "cpu"
        if model.get("from_config") is None:
            import torch  # only where the configuration leaves the choice to the machine

            trainer["accelerator"] = "gpu" if torch.cuda.is_available() else "cpu"
    values = GPU if trainer == trainer | {"accelerator": "gpu"} else CPU
    trainer |= {key: value for key, value in values.items() if trainer.get(key) == AUTO}
    if model.get("dtype") == AUTO:
        model["dtype"] = trainer["weights_dtype"]
    return {**tree, "trainer": trainer, "model": model}
