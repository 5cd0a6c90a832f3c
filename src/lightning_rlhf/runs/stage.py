"""Base class and list of the stages, and the settings of a run.

A stage outside this package is a `Stage` in a file that the stage's section of the configuration
names: `definition: path/to/file.py:STAGE`.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lightning_rlhf.callbacks.files import LoggerConfig
from lightning_rlhf.core import config as sections
from lightning_rlhf.core import ppo_config
from lightning_rlhf.core.errors import ConfigError, require
from lightning_rlhf.core.validation import STRICT, Options, PositiveInt, Text, described
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.io import console, user_code
from lightning_rlhf.models.config import ModelConfig
from lightning_rlhf.rewards.config import ComponentConfig
from lightning_rlhf.runs.console import CONF

if TYPE_CHECKING:
    from lightning_rlhf.data.formats import Kind
    from lightning_rlhf.models.checkpoint import Final


AUTO = "auto"
"""Value of `resume` with which a run resumes where there is one, and starts otherwise."""
SUM = "sum"
FSDP = "fsdp"
"""Value of trainer.strategy with which each process holds a part of the weights."""
PreflightMode = Literal["strict", "warn", "off", "only", "plan"]
DATA_KINDS: tuple[Kind, ...] = ("demonstrations", "preferences", "prompts")


class Stage:
    """A stage: what it is called and reads, and how it is built. One object is one run of it.

    A stage that trains has `build`, `restore` and `finish`, which `stages.fit` calls in a run, a
    check, an export and from the library. Another one has `measure` alone. `run` is a
    `runs.run.Run` everywhere.
    """

    name: ClassVar[str]
    """Value of `stage=`, key of the stage's section, and name of its folder."""
    title: ClassVar[str]
    """Heading of the curves."""
    config: ClassVar[type]
    """Frozen dataclass of the section; a StageConfig where the stage trains."""
    data: ClassVar[Kind]
    """Section of `data` that the stage reads."""
    also_reads: ClassVar[tuple[Kind, ...]] = ()
    """Further sections of `data` that the stage reads where they name a source."""
    reads_sft: ClassVar[bool] = True
    """True if the stage starts from the SFT model of the run, or of `policy.checkpoint`."""
    reads_reward: ClassVar[bool] = False
    """True if the stage reads the section `reward`, and the reward models named there."""
    reads_judge: ClassVar[bool] = False
    """True if the stage reads `data.judge`."""
    goal: ClassVar[tuple[tuple[str, Literal["min", "max"]], ...]] = ()
    """Metrics of an evaluation that select the best checkpoint, each with its direction; a later
    metric decides where the earlier ones are equal. Empty for a stage that does not train, or whose
    evaluations are neither better nor worse: `best` of its section names a metric then."""
    unit: ClassVar[str] = "optimizer step"
    """Unit in which steps are counted: the label of the x-axis of the curves."""
    headlines: ClassVar[tuple[str, ...]] = ()
    """Metrics in the progress bar."""
    summary: ClassVar[tuple[str, ...]] = ()
    """Metrics of the stage in the table of a sweep."""
    divides: ClassVar[bool] = False
    """True if the processes of a stage that does not train divide its work; the first one writes
    its files, and `measure` ends the others."""
    volatile: ClassVar[tuple[str, ...]] = ()
    """Keys of the section that may differ between two calls of a run, besides those that set when
    checkpoints are written."""
    hands_over: ClassVar[Literal["model", "report"]] = "model"
    """Content of `final/`: a model with a manifest, or a report."""
    numbers: ClassVar[str] = "fitness.json"
    """File of a report in `final/` whose key `metrics` holds its numbers."""

    panels: ClassVar[Any] = None
    """Function: names of the measured metrics -> panels of curves.png; None draws one panel a
    metric."""

    def build(self, run: Any) -> tuple[Any, Any, list[Any]]:
        """Return the module before its first step, its `StageData`, and the stage's callbacks.

        Raises an RLHFError where data, models or settings do not fit, before a model loads wherever
        that is possible.
        """
        raise NotImplementedError

    def restore(self, run: Any) -> Any:
        """Return the module before its first step, into which an export loads a checkpoint."""
        return self.build(run)[0]

    def finish(self, run: Any, module: Any, metrics: Mapping[str, float]) -> Path:
        """Write `final/` with the trained model and these metrics; return its path."""
        raise NotImplementedError

    def measure(self, run: Any) -> Path:
        """Do the work of a stage that does not train; return the path of `final/`."""
        raise NotImplementedError

    def report(self, run: Any, module: Any, loggers: Sequence[Any], step: int) -> None:
        """Measure the model of `step` that becomes `final/`, before the loggers are closed."""

    def summarise(self, run: Any, module: Any, metrics: dict[str, float]) -> dict[str, float]:
        """Print how a training ended; return its metrics with those that the stage adds."""
        numbers = (f"{name.removeprefix('eval/')} {x:z.3f}" for name, x in metrics.items())
        console.print_line(f"held out: {', '.join(numbers)}")
        return metrics

    def models(self, settings: Settings) -> Mapping[str, Final]:
        """Return the checkpoints that the stage reads besides SFT and reward models, by role."""
        return {}

    def rows_of(self, config: Any) -> Kind:
        """Return the kind of rows that a section of the stage reads from the data named `data`."""
        return self.data

    @property
    def trains(self) -> bool:
        """Return whether the stage has optimizer steps, and so checkpoints."""
        return issubclass(self.config, sections.StageConfig)

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the keys of the configuration that the stage does not read."""
        reads = {f"data.{kind}": kind in (self.data, *self.also_reads) for kind in DATA_KINDS}
        reads |= {"data.judge": self.reads_judge, "reward": self.reads_reward}
        reads["optimizer"] = self.trains
        return tuple(key for key, is_read in reads.items() if not is_read)


STAGES: Mapping[str, tuple[str, type]] = {
    "sft": ("stages.supervised:SFT", sections.SFTConfig),
    "rm": ("stages.supervised:RM", sections.RMConfig),
    "ppo": ("stages.ppo:PPO", ppo_config.PPOConfig),
    "dpo": ("stages.supervised:DPO", sections.DPOConfig),
    "rank": ("evaluation.evaluate_policy:Rank", sections.RankConfig),
    "eval_policy": ("evaluation.evaluate_policy:EvalPolicy", sections.PolicyEvalConfig),
    "eval_reward": ("evaluation.evaluate_reward:EvalReward", sections.EvalConfig),
}
"""Name -> class of a stage of this package, imported when it is chosen, and that of its section."""
DEFINITION = "definition"
"""Key that names the `Stage`, in the section of a stage outside this package."""


@cache
def find_stage(name: str) -> Stage | None:
    """Return the stage of this package with that name; None where there is none."""
    return pkgutil.resolve_name(f"lightning_rlhf.{STAGES[name][0]}")() if name in STAGES else None


def stage_names(tree: Mapping[Any, Any]) -> list[str]:
    """Return the names of the stages whose sections may stand in a configuration."""
    others = {key: x for key, x in tree.items() if key not in STAGES and isinstance(x, Mapping)}
    return [*STAGES, *(str(key) for key, node in others.items() if DEFINITION in node)]


def chosen_stage(tree: Mapping[str, Any]) -> tuple[str, type, Callable[[], Stage]]:
    """Return name, class of the section and definition of the stage that a configuration chooses.

    Raises ConfigError where it chooses none, an unknown one, or one whose definition is not a
    `Stage` of that name.
    """
    names, name = stage_names(tree), tree.get("stage")
    if name is None:
        allowed = f"stage={'|'.join(names)}, or recipe=quickstart for all of them"
        raise ConfigError(f"no stage is chosen; allowed: {allowed}")
    presets = [*CONF.glob("advantage/*.yaml"), *CONF.glob("policy_loss/*.yaml")]
    found = [f"; or stage=ppo {x.parent.name}={name}" for x in presets if x.stem == name]
    if name in typing.get_args(sections.LossType):
        found.append(f"; or stage=dpo dpo.loss_type={name}")
    added = "; +stages=NAME stage=NAME for stages/NAME.yaml in a folder of your own"
    require(name in names, "stage", name, "".join([", ".join(names), *found, added]))
    node, key = tree.get(name), f"{name}.{DEFINITION}"
    source = node.get(DEFINITION) if isinstance(node, Mapping) else None
    if name in STAGES:
        allowed = f"no key of {name}, a stage of the package; a stage of your own has another name"
        require(source is None, key, source, allowed)
        return name, STAGES[name][1], lambda: typing.cast(Stage, find_stage(name))
    own: type[Stage] = user_code.load_object(
        str(source), key, "stage", lambda x: isinstance(x, type) and Stage in x.__mro__[1:]
    )
    missing = [field for field in ("name", "title", "config", "data") if not hasattr(own, field)]
    require(not missing, key, source, f"a class with {', '.join(missing)}")
    require(own.name == name, key, source, f"a stage of the name {name!r}; it is {own.name!r}")
    return name, own.config, own


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
    precision: Annotated[
        Literal["32-true", "bf16-mixed"],
        described("auto, 32-true (or 32), bf16-mixed (or bf16), as trained weights stay in fp32"),
    ]
    weights_dtype: sections.DType
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
    """The checked configuration of a run of one stage."""

    stage: str
    """Name of the stage."""
    find: Callable[[], Stage] = dataclasses.field(compare=False)
    """Function that imports the stage and returns it."""
    config: Any
    """Section of the stage, as an instance of its class."""
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
    optimizer: Mapping[str, Any]
    """Class of the optimizer as `_target_`, and arguments; empty for AdamW."""
    policy: PolicySource
    rollout_server: sections.ServerConfig
    """Servers of rollout=vllm."""
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

    @property
    def definition(self) -> Stage:
        """Return the stage, which takes seconds to import."""
        return self.find()

    @property
    def shards(self) -> bool:
        """Return whether the processes of a training share the weights of its models."""
        return self.trainer.options.get("strategy") == FSDP and self.definition.trains


def section(tree: Mapping[str, Any], name: str, *keys: str) -> Mapping[str, Any]:
    """Return the mapping `tree[name]`. Raises ConfigError unless it is one that holds `keys`."""
    require(name in tree, name, "missing", "a mapping of keys to values")
    found = tree[name]
    require(isinstance(found, Mapping), name, found, "a mapping of keys to values")
    for key in keys:
        require(key in found, f"{name}.{key}", "missing", "a value")
    return typing.cast(Mapping[str, Any], found)


def reward_key(settings: Settings, name: str) -> str:
    """Return the configuration key of a component of the reward."""
    is_sum = settings.tree["reward"]["kind"] == SUM
    return f"reward.components.{name}" if is_sum else "reward"
