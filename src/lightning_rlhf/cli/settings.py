"""From Hydra's configuration to frozen dataclasses, before any model loads."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf.callbacks.loggers import LoggerConfig, logger_config
from lightning_rlhf.core.config import (
    EvalConfig,
    RMConfig,
    SFTConfig,
    require,
    require_flag,
    require_number,
    require_one_of,
    require_text,
)
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.config import DataConfig, Split
from lightning_rlhf.models.config import LoRASettings, ModelConfig
from lightning_rlhf.rewards import config as rewards
from lightning_rlhf.rewards.address import redacted
from lightning_rlhf.rewards.config import ComponentConfig

T = TypeVar("T")
SUM = "sum"
REWARDS: Mapping[str, type[ComponentConfig]] = {
    "function": rewards.FunctionConfig,
    "head": rewards.HeadConfig,
    "http": rewards.HTTPConfig,
    "model": rewards.ModelConfig,
    "random": rewards.RandomConfig,
}
"""Kind of a component of the reward -> its keys."""
EXAMPLES = {
    "reward.path": "rules.py:score",
    "reward.url": "http://127.0.0.1:8000/score",
}
"""Key of a value that must be given -> one that may be."""
STAGES: Mapping[str, type] = {
    "sft": SFTConfig,
    "rm": RMConfig,
    "ppo": PPOConfig,
    "eval": EvalConfig,
}


@dataclass(frozen=True, kw_only=True)
class PolicySource:
    """The model that a stage starts from."""

    checkpoint: str | None

    def __post_init__(self) -> None:
        if self.checkpoint is not None:
            require_text("policy.checkpoint", self.checkpoint, "a folder, a hub id, base, or null")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Where the run is computed: Lightning's Trainer, and torch's threads and weights."""

    accelerator: str
    devices: int
    precision: str
    weights_dtype: str
    threads: int | None
    log_every_n_steps: int

    def __post_init__(self) -> None:
        require_one_of("trainer.accelerator", self.accelerator, ("cpu", "gpu"))
        require(self.devices == 1, "trainer.devices", self.devices, "1")
        require_one_of("trainer.precision", self.precision, ("32-true", "bf16-mixed"))
        require_one_of("trainer.weights_dtype", self.weights_dtype, ("float32", "bfloat16"))
        if self.threads is not None:
            require_number("trainer.threads", self.threads, at_least=1, at_most=1024, whole=True)
        require_number("trainer.log_every_n_steps", self.log_every_n_steps, at_least=1, whole=True)


@dataclass(frozen=True, kw_only=True)
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
    """Of the newest checkpoint, or of the one of this name."""
    overwrite: bool
    record: bool
    """Whether PPO writes its rollouts; the other stages have none."""
    debug: bool
    tree: dict[str, Any]
    """The whole configuration as plain types."""


def read_settings(cfg: DictConfig) -> Settings:
    """Check the composed configuration. Raises ConfigError naming the key."""
    check_components(OmegaConf.to_container(cfg))
    tree = plain(cfg)
    known = {f.name for f in dataclasses.fields(Settings)} - {"config", "tree"}
    stage = _stage(tree)
    refuse_unknown(tree, known | {"recipe", stage}, "")
    for key in known:
        require(key in tree, key, "missing", "a value; it was taken out of the configuration")
    require_number("seed", tree["seed"], at_least=0, at_most=2**32 - 1, whole=True)
    for key in ("overwrite", "record", "debug"):
        require_flag(key, tree[key])
    tree["resume"] = read_resume(tree["resume"])
    names = {"run": tree["run"], "model.name": section(tree, "model", "name")["name"]}
    if tree["job"] is not None:
        names["job"] = tree["job"]
    for key, name in names.items():
        is_word = isinstance(name, str | int) and not isinstance(name, bool)
        is_name = is_word and re.fullmatch(r"\w[^/\\]*", str(name)) is not None
        require(is_name, key, name, "a folder name without slashes")
        require_text(key, str(name), "a folder name of at most 255 bytes, no line breaks")
        require(name not in STAGES, key, name, f"a name other than {', '.join(STAGES)}")
    tree |= {key: str(tree[key]) for key in ("run", "job") if key in names}
    tree["model"] = {**tree["model"], "name": str(tree["model"]["name"])}
    require_text("outputs", tree["outputs"], "a folder")
    if tree["resume"] and tree["overwrite"]:
        raise ConfigError("resume=true and overwrite=true exclude each other; give one of them")
    reward = read_reward(tree["reward"])
    config: Any = build(STAGES[stage], _frozen_lists(tree[stage]), stage)
    if isinstance(config, PPOConfig):
        check_normalization(config, reward)
    tree["reward"] = without_secrets(tree["reward"])
    return Settings(
        stage=stage,
        config=config,
        model=read_model(tree),
        data=_data(tree),
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
        raise ConfigError(f"{key} has no value: {str(error).splitlines()[0]}") from error
    return typing.cast(dict[str, Any], tree)


def read_resume(given: Any) -> bool | str:
    """Whether to resume, or the name of the checkpoint to resume from: 10 -> "000010"."""
    if isinstance(given, bool):
        return given
    name = str(given)
    is_name = isinstance(given, int | str) and re.fullmatch(r"[0-9]+|best", name) is not None
    require(is_name, "resume", given, "true, false, the step of a checkpoint, best")
    return name if name == "best" else f"{int(name):06d}"


def read_reward(node: Any) -> dict[str, ComponentConfig]:
    """The components of the section `reward` by name; a single one has the name of its kind."""
    kind = section({"reward": node}, "reward", "kind")["kind"]
    require_one_of("reward.kind", kind, (*REWARDS, SUM))
    if kind != SUM:
        return _weighing({kind: _component(node, "reward")})
    components = node.get("components")
    for key in set(node) - {"kind", "components"}:
        ours = {field.name for cls in REWARDS.values() for field in dataclasses.fields(cls)}
        names = list(components) if isinstance(components, Mapping) else []
        meant = f"{key}.KEY" if key in names else f"NAME.{key}" if key in ours else None
        if meant is not None:
            raise ConfigError(
                f"reward.{key} is not a known key of reward=sum; did you mean "
                f"reward.components.{meant}? Its names: {', '.join(map(str, names))}"
            )
    refuse_unknown(node, {"kind", "components"}, "reward.")
    require(isinstance(components, Mapping) and bool(components), "reward.components", components,
            "one or more rewards by name: +reward@reward.components.NAME=KIND")  # fmt: skip
    for name in components:
        require(re.fullmatch(r"[A-Za-z]\w*", str(name)) is not None, "a name in reward.components",
                name, "letters, digits and _, a letter first")  # fmt: skip
    return _weighing({
        str(name): _component(part, f"reward.components.{name}")
        for name, part in components.items()
    })  # fmt: skip


def _weighing(reward: dict[str, ComponentConfig]) -> dict[str, ComponentConfig]:
    if all(component.weight == 0 for component in reward.values()):
        raise ConfigError("every weight of reward is 0; allowed: one or more that are not")
    return reward


def check_components(tree: Any) -> None:
    """Raise ConfigError where a component of a sum was given keys and never put there.

    tree: may have values that are missing, which a name that is misspelt leaves.
    """
    for key in ("reward", "components"):
        if not isinstance(tree, Mapping) or key not in tree:
            return
        tree = tree[key]
    if not isinstance(tree, Mapping):
        return
    parts = {name: part for name, part in tree.items() if isinstance(part, Mapping)}
    whole = [str(name) for name, part in parts.items() if {"kind", "weight"} <= part.keys()]
    for name, part in parts.items():
        if str(name) in whole:
            continue
        close = difflib.get_close_matches(str(name), whole, n=1)
        kind = {"kind": "KIND", **part}["kind"]
        hint = f"did you mean {close[0]!r}? " if close and "kind" not in part else ""
        raise ConfigError(
            f"there is no component {str(name)!r} in reward.components; {hint}"
            f"+reward@reward.components.{name}={kind} puts one there, with all its keys"
        )


def check_normalization(config: PPOConfig, reward: Mapping[str, ComponentConfig]) -> None:
    """Raise ConfigError where running moments would be taken twice, of a part and of the whole."""
    own = [name for name, x in reward.items() if x.normalization == "running" or x.clip]
    if own and config.score_normalization != "none":
        raise ConfigError(
            f"ppo.score_normalization is {config.score_normalization!r} and the reward "
            f"{own[0]!r} is normalised by running moments or clipped already; allowed: one of "
            "the two, with ppo.score_normalization=none or normalization=none and clip=null"
        )


def without_secrets(node: Mapping[str, Any]) -> dict[str, Any]:
    """The section `reward` as it may be written down: no user and no password in addresses."""
    shown = dict(node)
    if "url" in shown:
        shown["url"] = redacted(shown["url"])
    if "components" in shown:
        parts = shown["components"]
        shown["components"] = {name: without_secrets(part) for name, part in parts.items()}
    return shown


def _component(node: Any, key: str) -> ComponentConfig:
    require(isinstance(node, Mapping), key, node, "a mapping of keys to values")
    require("kind" in node, f"{key}.kind", "missing", ", ".join(REWARDS))
    require_one_of(f"{key}.kind", node["kind"], REWARDS)
    config = build(REWARDS[node["kind"]], node, key)
    config.check(key)
    return config


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
    require_one_of("stage", stage, STAGES)
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
    """The section `model` of a configuration."""
    model = dict(section(tree, "model", "lora"))
    lora = build(LoRASettings, _frozen_lists(model["lora"]), "model.lora")
    return build(ModelConfig, model | {"lora": lora}, "model")


def _frozen_lists(node: Any) -> Any:
    """A mapping with tuples for its lists."""
    if not isinstance(node, Mapping):
        return node
    return {key: tuple(v) if isinstance(v, list) else v for key, v in node.items()}


def _data(tree: Mapping[str, Any]) -> DataConfig:
    kinds = ("demonstrations", "preferences", "prompts")
    data = dict(section(tree, "data", *kinds))
    splits = {kind: build(Split, data[kind], f"data.{kind}") for kind in kinds}
    return build(DataConfig, data | splits, "data")


def section(tree: Mapping[str, Any], name: str, *keys: str) -> Mapping[str, Any]:
    """The mapping `tree[name]`, which must hold `keys`."""
    require(name in tree, name, "missing", "a mapping of keys to values")
    found = tree[name]
    require(isinstance(found, Mapping), name, found, "a mapping of keys to values")
    for key in keys:
        require(key in found, f"{name}.{key}", "missing", "a value")
    return typing.cast(Mapping[str, Any], found)


def build(cls: type[T], node: Any, prefix: str) -> T:
    """`cls(**node)` with ConfigError for unknown and missing keys."""
    require(isinstance(node, Mapping), prefix, node, "a mapping of keys to values")
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    refuse_unknown(node, names, f"{prefix}.")
    required = {
        f.name
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING
    }
    missing = sorted(required - set(node))
    if missing:
        raise ConfigError(f"{prefix}.{missing[0]} is missing from the configuration")
    return cls(**node)


def refuse_unknown(node: Mapping[str, Any], known: set[str], prefix: str) -> None:
    """Raise ConfigError for a key that nothing reads."""
    for key in node:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {prefix}{close[0]}?" if close else ""
            raise ConfigError(f"{prefix}{key} is not a known key{hint}")
