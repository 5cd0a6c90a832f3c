"""The description of a stage, and the settings of a run. Imports no library that loads slowly.

A stage outside this package is a `Stage` in a file that the stage's section of the configuration
names: `definition: path/to/file.py:STAGE`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.callbacks.logger_config import LoggerConfig
from lightning_rlhf.core.config import DType, StageConfig
from lightning_rlhf.core.errors import ConfigError, require
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.validation import (
    STRICT,
    Options,
    PositiveInt,
    Text,
    build,
    described,
    refuse_unknown,
)
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.models.config import ModelConfig
from lightning_rlhf.rewards import config as rewards
from lightning_rlhf.rewards.config import ComponentConfig, redacted

if TYPE_CHECKING:
    from lightning_rlhf.data.formats import Kind
    from lightning_rlhf.models.checkpoint import Final
    from lightning_rlhf.report.curves import Panel


def section(tree: Mapping[str, Any], name: str, *keys: str) -> Mapping[str, Any]:
    """Return the mapping `tree[name]`. Raises ConfigError unless it is one that holds `keys`."""
    require(name in tree, name, "missing", "a mapping of keys to values")
    found = tree[name]
    require(isinstance(found, Mapping), name, found, "a mapping of keys to values")
    for key in keys:
        require(key in found, f"{name}.{key}", "missing", "a value")
    return typing.cast(Mapping[str, Any], found)


SUM = "sum"
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
    if kind != SUM:
        return _weighing({kind: _component(node, "reward")})
    components = node.get("components")
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
    """Raise ConfigError where keys are given for a component of a sum that was not added to it.

    tree: configuration; values may be missing, as after a misspelt name.
    """
    reward = tree.get("reward") if isinstance(tree, Mapping) else None
    parts = reward.get("components") if isinstance(reward, Mapping) else None
    parts = parts if isinstance(parts, Mapping) else {}
    parts = {str(name): part for name, part in parts.items() if isinstance(part, Mapping)}
    whole = [name for name, part in parts.items() if {"kind", "weight"} <= part.keys()]
    for name in parts.keys() - set(whole):
        kind = parts[name].get("kind", "KIND")
        close = difflib.get_close_matches(name, whole, n=1) if kind == "KIND" else []
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"there is no component {name!r} in reward.components; {hint}"
            f"+reward@reward.components.{name}={kind} puts one there, with all its keys"
        )


def check_normalization(config: PPOConfig, reward: Mapping[str, ComponentConfig]) -> None:
    """Raise ConfigError where both a component and the whole score use running moments."""
    own = [name for name, x in reward.items() if x.normalization == "running" or x.clip]
    if own and config.score_normalization != "none":
        raise ConfigError(
            f"ppo.score_normalization is {config.score_normalization!r} and the reward "
            f"{own[0]!r} is normalised by running moments or clipped already; allowed: one of "
            "the two, with ppo.score_normalization=none or normalization=none and clip=null"
        )


def redacted_section(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `reward` with users, passwords and queries removed from its URLs."""
    shown = dict(node)
    if "url" in shown:
        shown["url"] = redacted(shown["url"])
    if "components" in shown:
        parts = shown["components"]
        shown["components"] = {name: redacted_section(part) for name, part in parts.items()}
    return shown


def _component(node: Any, key: str) -> ComponentConfig:
    require(isinstance(node, Mapping), key, node, "a mapping of keys to values")
    kinds = ", ".join(REWARDS)
    require("kind" in node, f"{key}.kind", "missing", kinds)
    require(node["kind"] in list(REWARDS), f"{key}.kind", node["kind"], kinds)
    config = build(REWARDS[node["kind"]], node, key)
    config.check(key)
    return config


AUTO = "auto"
"""Value of `resume` with which a run resumes where there is one, and starts otherwise."""
PreflightMode = Literal["strict", "warn", "off", "only", "plan"]
DATA_KINDS: tuple[Kind, ...] = ("demonstrations", "preferences", "prompts")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicySource:
    """Model that a stage starts from."""

    checkpoint: Annotated[Text, described("a folder, a hub id, base")] | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainerConfig:
    """Settings of Lightning's Trainer, torch's number of threads and the type of the weights."""

    accelerator: Annotated[Literal["cpu", "gpu"], described("auto, cpu, gpu")]
    """Kind of device; auto has been resolved to one of the two."""
    devices: Annotated[
        PositiveInt,
        described("a whole number >= 1, of GPUs of this machine or of processes on its CPU"),
    ]
    num_nodes: PositiveInt
    precision: Literal["32-true", "bf16-mixed"]
    weights_dtype: DType
    threads: Annotated[int, Field(ge=1, le=1024)] | None
    matmul_precision: Literal["highest", "high", "medium"]
    log_every_n_steps: PositiveInt
    options: Options
    """Class and further arguments of the Trainer, as given in the section."""

    @property
    def processes(self) -> int:
        """Return the number of processes, one for each device of each machine."""
        return self.devices * self.num_nodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run of one stage."""

    stage: str
    """Name of the stage."""
    definition: Stage
    """Description of the stage."""
    config: Any
    """Section of the stage, as an instance of `definition.config`."""
    model: ModelConfig
    data: DataConfig
    reward: Mapping[str, ComponentConfig]
    """Components of the reward by name."""
    trainer: TrainerConfig
    logger: LoggerConfig
    custom_logger: Mapping[str, Any] | None
    """Logger of the user's own, as `_target_` and arguments; None for a logger of the package."""
    callbacks: Mapping[str, Any]
    """Callbacks of the user's own: name -> `_target_` and arguments."""
    policy: PolicySource
    run: str
    job: str | None
    seed: int
    outputs: Path
    resume: bool | str
    """Whether to resume from the newest checkpoint, the name of another one, or "auto"."""
    overwrite: bool
    preflight: PreflightMode
    """Whether a failed check before the first update ends the run, is a warning, or is not made;
    "only" makes the checks and no run, "plan" prints the memory plan alone."""
    record: bool
    """True if PPO writes its rollouts; the other stages have none."""
    debug: bool
    samples: bool
    """True if sampled responses are printed."""
    tree: dict[str, Any]
    """The whole configuration as plain types."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Description of a stage for the command line, recipes, resume, sweeps and reports."""

    name: str
    """Value of `stage=`, key of the stage's section, and name of its folder."""
    title: str
    """Heading of the curves."""
    config: type
    """Frozen dataclass of the section; a StageConfig where the stage trains."""
    data: Kind
    """Section of `data` that the stage reads."""
    also_reads: tuple[Kind, ...] = ()
    """Further sections of `data` that the stage reads where they name a source."""
    run: Callable[[Settings, Any], Path]
    """(settings, their `config`) -> path of the `final/` folder that the stage hands over."""
    prepare: Callable[[Settings, Any], Any] | None = None
    """(settings, their `config`) -> a `launch.Training`, for a Trainer of the user's own."""
    build: Callable[..., Any] | None = None
    """Function: (Prepared, Roles, config, ...) -> LightningModule before its first step, for
    exports."""
    reads_sft: bool = True
    """True if the stage starts from the SFT model of the run, or of `policy.checkpoint`."""
    reads_reward: bool = False
    """True if the stage reads the section `reward`, and the reward models named there."""
    reads_judge: bool = False
    """True if the stage reads `data.judge`."""
    reads_models: Callable[[Settings], Mapping[str, Final]] | None = None
    """Function of the settings that returns the other checkpoints that the stage reads, by role."""
    check: Callable[[Settings, Mapping[str, Final]], object] | None = None
    """Function of (settings, parents by role) that raises an RLHFError for errors that can be found
    before Lightning and torch are imported."""
    goal: tuple[tuple[str, Literal["min", "max"]], ...] = ()
    """Metrics of an evaluation that select the best checkpoint, each with its direction; a later
    metric decides where the earlier ones are equal. Empty for a stage that does not train, or whose
    evaluations are neither better nor worse: `best` of its section names a metric then."""
    unit: str = "optimizer step"
    """Unit in which steps are counted: the label of the x-axis of the curves."""
    validates_first: bool = False
    """True if all validation data are evaluated before the first step."""
    headlines: tuple[str, ...] = ()
    """Metrics in the progress bar."""
    summary: tuple[str, ...] = ()
    """Metrics of the stage in the table of a sweep."""
    panels: Callable[[Collection[str]], Sequence[Panel]] | None = None
    """Function: names of the measured metrics -> panels of curves.png; None draws one panel a
    metric."""
    divides: bool = False
    """True if the processes of a stage that does not train divide its work; the first one writes
    its files, and `run` ends the others."""
    export: Callable[[Settings, Any, Any], Path] | None = None
    """(settings, their `config`, a `folder.ending.Export`) -> path of the folder that was made from
    a checkpoint."""
    volatile: tuple[str, ...] = ()
    """Keys of the section that may differ between two calls of a run, besides those that set when
    checkpoints are written."""
    hands_over: Literal["model", "report"] = "model"
    """Content of `final/`: a model with a manifest, or a report."""
    numbers: str = "fitness.json"
    """File of a report in `final/` whose key `metrics` holds its numbers."""

    @property
    def trains(self) -> bool:
        """Return whether the stage has optimizer steps, and so checkpoints."""
        return issubclass(self.config, StageConfig)

    @property
    def runs_in_processes(self) -> bool:
        """Return whether the stage computes in as many processes as trainer.devices says."""
        return self.trains or self.divides

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the keys of the configuration that the stage does not read."""
        read = (self.data, *self.also_reads)
        return (
            *(f"data.{kind}" for kind in DATA_KINDS if kind not in read),
            *(() if self.reads_judge else ("data.judge",)),
            *(() if self.reads_reward else ("reward",)),
        )


def reward_key(settings: Settings, name: str) -> str:
    """Return the configuration key of a component of the reward."""
    is_sum = settings.tree["reward"]["kind"] == SUM
    return f"reward.components.{name}" if is_sum else "reward"
