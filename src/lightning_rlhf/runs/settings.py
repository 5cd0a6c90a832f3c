"""Turns Hydra's configuration into frozen dataclasses, before any model loads."""

import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf.callbacks.files import Kind, LoggerConfig, logger_config
from lightning_rlhf.core import validation
from lightning_rlhf.core.config import ServerConfig
from lightning_rlhf.core.errors import ConfigError, first_line, naming_own_keys, require
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.io.user_code import optional
from lightning_rlhf.models.config import ModelConfig
from lightning_rlhf.rewards import config as rewards
from lightning_rlhf.runs import stage as stages
from lightning_rlhf.runs.stage import AUTO, DEFINITION, SUM, Settings, TrainerConfig, section

EXAMPLES = {"reward.path": "rules.py:score", "reward.url": "http://127.0.0.1:8000/score"}
"""Key of a value that must be given -> example of such a value."""
FOLDER_NAME = (
    "a folder name of at most 255 bytes, without slashes, line breaks and other hidden characters, "
    "which begins with a letter or digit and does not end with a dot or space; quote what reads as "
    "no text: \"{key}='NAME'\""
)
NAME = r"\w[^/\\]*(?<![. ])"
OBJECTS = ("callbacks", "plugins", "profiler", "strategy")
"""Keys of `trainer` whose values may be objects with arguments of their own."""
TYPES: Mapping[str, Any] = {
    "seed": validation.Seed,
    "preflight": stages.PreflightMode,
    "outputs": Annotated[validation.Text, validation.described("a folder")],
    **dict.fromkeys(("overwrite", "record", "debug", "samples"), bool),
}
"""Top-level key of one value -> type of the value."""
KEYS = {f.name for f in fields(Settings)} - {"config", "custom_logger", "find", "tree"}
"""Top-level keys of a configuration besides the section of its stage, `recipe` and `final`."""
GPU = {"precision": "bf16-mixed", "weights_dtype": "bfloat16"}
CPU = {"precision": "32-true", "weights_dtype": "float32"}
"""Values of the keys set to auto, on a GPU and on the CPU."""
PRECISION_ALIASES = {"32": "32-true", "bf16": "bf16-mixed"}
"""Lightning's short name of a precision -> the long one."""
PASSED: Mapping[str, Any] = {
    **dict.fromkeys(("callbacks", "max_time", "plugins", "profiler", "strategy"), Any),
    **dict.fromkeys(("benchmark", "enable_model_summary", "enable_progress_bar"), bool | None),
    "detect_anomaly": bool,
    "deterministic": Annotated[
        bool | Literal["warn"] | None, validation.described("true, false, warn, null")
    ],
}
"""Arguments of lightning.Trainer that are passed on unchanged -> type; Lightning checks Any."""
OWNED: Mapping[str, str] = {
    name: reason
    for reason, names in {
        "a run is one epoch: sft.epochs, rm.epochs or ppo.iterations say how long it is":
            "limit_train_batches max_epochs max_steps min_epochs min_steps",
        "lightning-rlhf check tries a stage without training": "fast_dev_run num_sanity_val_steps",
        "val_every in the section of the stage says when a run evaluates":
            "check_val_every_n_epoch val_check_interval",
        "data.max_val_rows says on how many rows a run evaluates": "limit_val_batches",
        "a run trains and evaluates on all of its data, in an order that it resumes":
            "inference_mode limit_predict_batches limit_test_batches overfit_batches "
            "reload_dataloaders_every_n_epochs sync_batchnorm use_distributed_sampler",
        "a run writes its configuration, metrics and checkpoints into its folder, which outputs, "
        "run and job name; checkpoint_every in the section of the stage says when it is saved":
            "barebones default_root_dir enable_autolog_hparams enable_checkpointing model_registry",
        "microbatch_size in the section of the stage splits a batch": "accumulate_grad_batches",
        "max_grad_norm in the section of the stage clips the norm of the gradient":
            "gradient_clip_algorithm gradient_clip_val",
        "the group logger says where metrics go": "logger",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Arguments of lightning.Trainer that a stage sets itself -> what to use instead."""


def read_settings(cfg: DictConfig) -> Settings:
    """Check the composed configuration. Raises ConfigError naming the key.

    In its tree, callbacks and loggers keep their interpolations: what `${oc.env:KEY}` stands for is
    written to no file and no tracker.
    """
    settings = read_tree(plain(cfg))
    if settings.logger.kind == "tensorboard":
        optional("tensorboard", "tensorboard", "logger=tensorboard")
    unresolved: Any = OmegaConf.to_container(cfg)
    tree = settings.tree | {key: unresolved[key] for key in ("callbacks", "logger")}
    trainer = tree["trainer"]
    objects = {key: unresolved["trainer"][key] for key in OBJECTS if key in trainer}
    return replace(settings, tree=tree | {"trainer": trainer | objects})


def read_tree(tree: dict[str, Any]) -> Settings:
    """Check a configuration of plain types, as a run writes it.

    Sections of stages that it does not choose are ignored. Raises ConfigError naming the key.
    """
    stage, config_class, find = stages.chosen_stage(tree)
    others = {*stages.stage_names(tree)} - {stage}
    tree = {key: node for key, node in tree.items() if key not in others}
    validation.refuse_unknown(tree, KEYS | {"recipe", "final", stage}, "")
    for key in (*KEYS, stage):
        require(key in tree, key, "missing", "a value; it was taken out of the configuration")
    if tree["preflight"] is False:
        tree["preflight"] = "off"  # which is false in a YAML file
    for key, kind in TYPES.items():
        validation.check_value(key, tree[key], kind)
    tree["resume"] = resume = read_resume(tree["resume"])
    if resume and tree["overwrite"]:
        both = f"resume={str(resume).lower()} and overwrite=true"
        raise ConfigError(f"{both} exclude each other; give one of them")
    tree = resolve_auto(tree | folder_names(tree))
    reward, node = read_reward(tree["reward"]), tree[stage]
    if isinstance(node, Mapping):
        node = {key: value for key, value in node.items() if key != DEFINITION}
        has_keys = not issubclass(config_class, PPOConfig) or "advantage" in node
        keys = f"the keys of an estimator: +advantage@{stage}=gae, or `/advantage@_here_: gae` in"
        require(has_keys, f"{stage}.advantage", "missing", f"{keys} stages/{stage}.yaml")
    with naming_own_keys(stage, {f.name for f in fields(config_class)}):
        config: Any = validation.build(config_class, node, stage)
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
        model=validation.build(ModelConfig, section(tree, "model"), "model"),
        data=validation.build(DataConfig, tree["data"], "data"),
        reward=reward,
        trainer=read_trainer(tree["trainer"]),
        logger=logger,
        custom_logger=custom_logger,
        callbacks=section(tree, "callbacks"),
        optimizer=section(tree, "optimizer"),
        policy=validation.build(stages.PolicySource, tree["policy"], "policy"),
        rollout_server=validation.build(ServerConfig, tree["rollout_server"], "rollout_server"),
        outputs=Path(os.path.expanduser(tree["outputs"])),
        tree=tree,
        **{key: tree[key] for key in ("run", "job", "resume", *TYPES) if key != "outputs"},
    )


def folder_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections that name a folder of the run, with their names as text.

    Raises ConfigError where a name is not printable or not valid on every file system.
    """
    model, names = section(tree, "model", "name"), stages.stage_names(tree)
    for key, name in {"run": tree["run"], "model.name": model["name"], "job": tree["job"]}.items():
        if key != "job" or name is not None:
            text = str(name) if isinstance(name, str | int) and not isinstance(name, bool) else ""
            is_name = re.fullmatch(NAME, text) is not None and text.isprintable()
            fits = is_name and len(text.encode()) <= 255
            require(fits, key, name, FOLDER_NAME.format(key=key))
            require(name not in names, key, name, f"a name other than {', '.join(names)}")
    job = None if tree["job"] is None else str(tree["job"])
    return {"run": str(tree["run"]), "job": job, "model": {**model, "name": str(model["name"])}}


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return the configuration resolved, as plain types, without sections of other stages.

    Raises ConfigError where a value is missing or cannot be resolved.
    """
    try:
        unresolved: Any = OmegaConf.to_container(cfg)
        stage = OmegaConf.select(cfg, "stage")
        is_node = OmegaConf.is_config
        allowed = "the name of one stage; -m stage=A,B runs several"
        require(not is_node(stage), "stage", stage, allowed)
        others = {*stages.stage_names(unresolved)} - {stage}
        keys = [str(key) for key in cfg if key not in others]
        missing = {key for key in keys if OmegaConf.is_missing(cfg, key)}
        nodes = {key: cfg[key] for key in keys if key not in missing}
        missing.update(*(OmegaConf.missing_keys(x) for x in nodes.values() if is_node(x)))
        if missing:
            path = OmegaConf.select(cfg, "model.name_or_path", throw_on_missing=False) or "..."
            examples = EXAMPLES | {"model.name": Path(str(path)).absolute().name}
            choices = " ".join(f"{key}={examples.get(key, '...')}" for key in sorted(missing))
            raise ConfigError(f"{' and '.join(sorted(missing))} must be given: {choices}")
        return {
            key: OmegaConf.to_container(node, resolve=True) if is_node(node) else node
            for key, node in nodes.items()
        }
    except OmegaConfBaseException as error:
        key = error.full_key or "a key"
        raise ConfigError(f"{key} has no value: {first_line(error)}") from error


def read_resume(given: Any) -> bool | str:
    """Return whether to resume, AUTO, or the name of a checkpoint: "000010" for 10."""
    if isinstance(given, bool) or given in (AUTO, "best"):
        return given  # type: ignore[no-any-return]
    is_step = isinstance(given, int | str) and str(given).isdecimal()
    require(is_step, "resume", given, "true, false, auto, the step of a checkpoint, best")
    return f"{int(given):06d}"


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


REWARDS: Mapping[str, type[rewards.ComponentConfig]] = {
    "function": rewards.FunctionConfig,
    "head": rewards.HeadConfig,
    "http": rewards.HTTPConfig,
    "model": rewards.TextModelConfig,
    "random": rewards.RandomConfig,
}
"""Kind of a component of the reward -> class of its configuration."""


def read_reward(node: Any) -> dict[str, rewards.ComponentConfig]:
    """Return the components of the section `reward` by name; a single one is named by its kind."""
    kind = section({"reward": node}, "reward", "kind")["kind"]
    parts, key, kinds = {str(kind): node}, "reward", ", ".join(REWARDS)
    if kind == SUM:
        parts, key = node.get("components"), "reward.components.{}"
        validation.refuse_unknown(node, {"kind", "components"}, "reward.")
        word = "+reward@reward.components.NAME=KIND"
        are_named = isinstance(parts, Mapping) and bool(parts)
        require(are_named, "reward.components", parts, f"one or more rewards by name: {word}")
        kinds += f"; {word} sets all keys of a component"
    else:
        kinds += f", {SUM}"
    reward, letters = {}, "letters, digits and _, a letter first"
    for name, part in parts.items():
        is_name = re.fullmatch(r"[A-Za-z]\w*", str(name)) is not None or kind != SUM
        require(is_name, "a name in reward.components", name, letters)
        own = key.format(name)
        found = section({own: part}, own).get("kind", "missing")
        require(found in list(REWARDS), f"{own}.kind", found, kinds)
        reward[str(name)] = validation.build(REWARDS[found], part, own)
        reward[str(name)].check(own)
    if all(component.weight == 0 for component in reward.values()):
        raise ConfigError("every weight of reward is 0; allowed: one or more that are not")
    return reward


def redacted_section(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `reward` with users, passwords and queries removed from its URLs."""
    shown = dict(node)
    if "url" in shown:
        shown["url"] = rewards.redacted(shown["url"])
    if "components" in shown:
        parts = shown["components"].items()
        shown["components"] = {name: redacted_section(part) for name, part in parts}
    return shown


def read_trainer(node: Any) -> TrainerConfig:
    """Return the section, checked. Raises ConfigError naming the key."""
    node, options = section({"trainer": node}, "trainer"), {"_target_": "lightning.Trainer"}
    for key in OWNED.keys() & node.keys():
        found = f"trainer.{key} is {node[key]!r}"
        raise ConfigError(f"{found}, but it is not to be set: {OWNED[key]}")
    ours = TrainerConfig.__dataclass_fields__.keys() - {"options"}
    validation.refuse_unknown(node, {*ours, *PASSED, "_target_"}, "trainer.")
    for key in PASSED.keys() & node.keys():
        validation.check_value(f"trainer.{key}", node[key], PASSED[key])
    options |= {key: value for key, value in node.items() if key not in ours}
    own = {key: value for key, value in node.items() if key in ours}
    return validation.build(TrainerConfig, own | {"options": options}, "trainer")


def resolve_auto(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration in which trainer=auto is replaced by settings for this machine.

    A GPU that torch can use gets bf16-mixed with frozen weights in bfloat16; else the CPU is used
    in float32. A model with random weights (model.from_config) is small and stays on the CPU.
    """
    trainer, model = dict(section(tree, "trainer")), dict(section(tree, "model"))
    if trainer.get("accelerator") == AUTO:
        trainer["accelerator"] = "cpu"
        if model.get("from_config") is None:
            import torch  # only where the configuration leaves the choice to the machine

            trainer["accelerator"] = "gpu" if torch.cuda.is_available() else "cpu"
    values = GPU if trainer.get("accelerator") == "gpu" else CPU
    trainer |= {key: value for key, value in values.items() if trainer.get(key) == AUTO}
    trainer["precision"] = PRECISION_ALIASES.get(
        str(trainer.get("precision")), trainer.get("precision")
    )
    if model.get("dtype") == AUTO:
        model["dtype"] = trainer["weights_dtype"]
    return {**tree, "trainer": trainer, "model": model}
