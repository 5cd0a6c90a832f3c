"""From Hydra's configuration to frozen dataclasses, before any model loads."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.callbacks.logger_config import LoggerConfig, logger_config
from lightning_rlhf.core.config import DType, EvalConfig, RMConfig, SFTConfig
from lightning_rlhf.core.errors import ConfigError, first_line, require
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.validation import (
    STRICT,
    PositiveInt,
    Text,
    build,
    check_value,
    described,
    refuse_unknown,
)
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.models.config import ModelConfig
from lightning_rlhf.rewards.config import ComponentConfig
from lightning_rlhf.stages.reward_section import (
    SUM,
    check_components,
    check_normalization,
    read_reward,
    redacted_section,
)
from lightning_rlhf.stages.sections import section

EXAMPLES = {
    "reward.path": "rules.py:score",
    "reward.url": "http://127.0.0.1:8000/score",
}
"""Key of a value that must be given -> one that may be."""
AUTO = "auto"
"""Value of `resume` with which a run goes on if it can, and starts where there is none."""
FOLDER_NAME = (
    "a folder name of characters that can be seen, without slashes and line breaks, which begins "
    "with a letter or digit and does not end with a dot or space"
)
FolderName = Annotated[Text, described("a folder name of at most 255 bytes, no line breaks")]
STAGES: Mapping[str, type] = {
    "sft": SFTConfig,
    "rm": RMConfig,
    "ppo": PPOConfig,
    "eval": EvalConfig,
}


Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicySource:
    """The model that a stage starts from."""

    checkpoint: Annotated[Text, described("a folder, a hub id, base")] | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainerConfig:
    """Where the run is computed: Lightning's Trainer, and torch's threads and weights."""

    accelerator: Literal["cpu", "gpu"]
    devices: Literal[1]
    precision: Literal["32-true", "bf16-mixed"]
    weights_dtype: DType
    threads: Annotated[int, Field(ge=1, le=1024)] | None
    log_every_n_steps: PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run of one stage is told."""

    stage: Literal["sft", "rm", "ppo", "eval"]
    config: SFTConfig | RMConfig | PPOConfig | EvalConfig
    model: ModelConfig
    data: DataConfig
    reward: Mapping[str, ComponentConfig]
    """What PPO maximises: name of a component -> what it is."""
    trainer: TrainerConfig
    logger: LoggerConfig
    policy: PolicySource
    run: str
    job: str | None
    seed: int
    outputs: Path
    resume: bool | str
    """From the newest checkpoint, from the one of this name, or AUTO."""
    overwrite: bool
    record: bool
    """Whether PPO writes its rollouts; the other stages have none."""
    debug: bool
    tree: dict[str, Any]
    """The whole configuration as plain types."""


def read_settings(cfg: DictConfig) -> Settings:
    """Check the composed configuration. Raises ConfigError naming the key."""
    check_components(OmegaConf.to_container(cfg))
    return read_tree(plain(cfg))


def read_tree(tree: dict[str, Any]) -> Settings:
    """Check a configuration of plain types, as a run writes it. Raises ConfigError as above."""
    tree = dict(tree)
    known = {f.name for f in dataclasses.fields(Settings)} - {"config", "tree"}
    stage = _stage(tree)
    refuse_unknown(tree, known | {"recipe", stage}, "")
    for key in (*known, stage):
        require(key in tree, key, "missing", "a value; it was taken out of the configuration")
    check_value("seed", tree["seed"], Seed)
    for key in ("overwrite", "record", "debug"):
        check_value(key, tree[key], bool)
    tree["resume"] = read_resume(tree["resume"])
    tree |= folder_names(tree)
    check_value("outputs", tree["outputs"], Annotated[Text, described("a folder")])
    if tree["resume"] and tree["overwrite"]:
        given = "true" if tree["resume"] is True else tree["resume"]
        raise ConfigError(f"resume={given} and overwrite=true exclude each other; give one of them")
    reward = read_reward(tree["reward"])
    config: Any = build(STAGES[stage], tree[stage], stage)
    if isinstance(config, PPOConfig):
        check_normalization(config, reward)
    tree["reward"] = redacted_section(tree["reward"])
    return Settings(
        stage=stage,
        config=config,
        model=read_model(tree),
        data=build(DataConfig, tree["data"], "data"),
        reward=reward,
        trainer=build(TrainerConfig, tree["trainer"], "trainer"),
        logger=logger_config(section(tree, "logger", "kind")),
        policy=build(PolicySource, tree["policy"], "policy"),
        run=tree["run"],
        job=tree["job"],
        seed=tree["seed"],
        outputs=Path(os.path.expanduser(tree["outputs"])),
        resume=tree["resume"],
        overwrite=tree["overwrite"],
        record=tree["record"],
        debug=tree["debug"],
        tree=tree,
    )


def folder_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections that name a folder of the run, with their names as text.

    Raises ConfigError where one is no name that a person can read and every file system takes.
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
        require(name not in STAGES, key, name, f"a name other than {', '.join(STAGES)}")
    model_name = str(names.pop("model.name"))
    texts = {key: str(name) for key, name in names.items()}
    return {**texts, "model": {**model, "name": model_name}}


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The configuration resolved, as plain types. Raises ConfigError where a value is missing."""
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        if missing:
            given = {**dict.fromkeys(missing, "..."), **EXAMPLES}
            told = " ".join(f"{key}={given[key]}" for key in missing)
            raise ConfigError(f"{' and '.join(missing)} must be given: {told}")
        tree = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        key = error.full_key or "a key"
        raise ConfigError(f"{key} has no value: {first_line(error)}") from error
    return typing.cast(dict[str, Any], tree)


def read_resume(given: Any) -> bool | str:
    """Return whether to resume, AUTO, or the name of a checkpoint: 10 -> "000010"."""
    if isinstance(given, bool) or given == AUTO:
        return given  # type: ignore[no-any-return]
    name = str(given)
    is_name = isinstance(given, int | str) and re.fullmatch(r"[0-9]+|best", name) is not None
    require(is_name, "resume", given, "true, false, auto, the step of a checkpoint, best")
    return name if name == "best" else f"{int(name):06d}"


def reward_key(settings: Settings, name: str) -> str:
    """Where a component of the reward stands in the configuration."""
    is_sum = settings.tree["reward"]["kind"] == SUM
    return f"reward.components.{name}" if is_sum else "reward"


def _stage(tree: Mapping[str, Any]) -> Any:
    if "stage" not in tree:
        raise ConfigError(
            f"no stage is chosen; allowed: stage={'|'.join(STAGES)}, or recipe=quickstart for all "
            "of them"
        )
    stage = tree["stage"]
    require(stage in list(STAGES), "stage", stage, ", ".join(STAGES))
    for other in STAGES:
        if other != stage and other in tree:
            node = tree[other]
            keys = [f"{other}.{key}" for key in node] if isinstance(node, Mapping) else [other]
            raise ConfigError(
                f"stage={stage} does not read {', '.join(keys[:3])}{', ...' * (len(keys) > 3)}; "
                f"leave out what sets it, or give it to stage={other}"
            )
    return stage


def read_model(tree: Mapping[str, Any]) -> ModelConfig:
    """Return the section `model` of a configuration."""
    return build(ModelConfig, section(tree, "model"), "model")
