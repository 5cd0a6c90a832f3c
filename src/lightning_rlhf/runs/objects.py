"""Objects that a configuration names by `_target_`: callbacks, loggers, and the Trainer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    Checkpoint,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_rlhf.callbacks.stop import Stop
from lightning_rlhf.callbacks.stopping import MaxTime
from lightning_rlhf.core.errors import ConfigError, StorageError, first_line, require
from lightning_rlhf.io.storage import full_disk
from lightning_rlhf.io.user_code import permitted
from lightning_rlhf.parallel.world import world
from lightning_rlhf.runs.accelerator import strategy
from lightning_rlhf.runs.folders import check_writable
from lightning_rlhf.runs.stage import Settings, TrainerConfig

_CHECKPOINTS = (
    "a run writes checkpoints from which it resumes exactly; checkpoint_every, checkpoint_minutes "
    "and checkpoints_kept in the section of the stage say when and how many"
)
_AVERAGES = "final/ is the model of the last step; lr in the section of the stage sets its noise"
REFUSED: Mapping[type, str] = {
    Checkpoint: _CHECKPOINTS,
    CheckpointIO: _CHECKPOINTS,
    GradientAccumulationScheduler: "microbatch_size in the section of the stage splits a batch",
    StochasticWeightAveraging: _AVERAGES,
    WeightAveraging: _AVERAGES,
    ModelPruning: "the roles share one copy of the base weights; model.lora.r sets the size of "
    "what is trained",
    BaseFinetuning: "model.lora, and finetune in the section sft, say which weights are trained",
    BatchSizeFinder: "microbatch_size in the section of the stage splits a batch",
    LearningRateFinder: "lr in the section of the stage is the learning rate; a sweep compares "
    "several",
}
"""Class of Lightning that a run cannot use -> the reason, and what to use instead."""


def own_callbacks(settings: Settings) -> list[Callback]:
    """Return the callbacks of the sections `trainer.callbacks` and `callbacks`.

    `callbacks.NAME=null` is none. Raises ConfigError naming the key.
    """
    found = []
    given = {key: x for key, x in settings.trainer.options.items() if key == "callbacks"}
    for callback in listed(instantiated(given, "trainer.callbacks"), "callbacks"):
        is_callback = isinstance(callback, Callback)
        require(is_callback, "trainer.callbacks", callback, "Callbacks, each by its _target_")
        refuse_owned("trainer.callbacks", callback)
        found.append(callback)
    for name, node in settings.callbacks.items():
        if node is not None:
            found.append(built(node, f"callbacks.{name}", Callback))
    return found


def own_loggers(settings: Settings) -> list[Logger]:
    """Return the logger that the section `logger` names by `_target_`, if it does."""
    node = settings.custom_logger
    if node is None:
        return []
    logger = built(node, "logger", Logger)
    if (folder := logger.save_dir) is not None and "://" not in str(folder):
        check_writable("logger.save_dir", Path(folder), Path(folder))
    return [logger]


def own_arguments(settings: Settings) -> dict[str, Any]:
    """Return the arguments of lightning.Trainer in `trainer.options`, with their objects built.

    Without the callbacks, which `own_callbacks` returns. Raises ConfigError naming the key.
    """
    skipped = ("_target_", "callbacks")
    options = {key: x for key, x in settings.trainer.options.items() if key not in skipped}
    found: dict[str, Any] = instantiated(options, "trainer")
    for key, value in found.items():
        require(not isinstance(value, Mapping), f"trainer.{key}", value,
                "a value that lightning.Trainer takes, or a mapping with _target_")  # fmt: skip
    for plugin in listed(found, "plugins"):
        refuse_owned("trainer.plugins", plugin)
    for own in listed(found, "strategy"):
        if isinstance(own, Strategy) and not isinstance(own, SingleDeviceStrategy):
            raise ConfigError(
                f"trainer.strategy is a {type(own).__name__}, but the processes of a run "
                "(trainer.devices, trainer.num_nodes) sum their gradients themselves; allowed: "
                "auto, SingleDeviceStrategy"
            )
    return found


def refuse_owned(key: str, found: Any) -> None:
    """Raise ConfigError where the object does what a stage does itself."""
    for kind, reason in REFUSED.items():
        if isinstance(found, kind):
            name = type(found).__name__
            raise ConfigError(f"{key} is a {name}, which is not to be set: {reason}")


def check_trainer(config: TrainerConfig, options: Mapping[str, Any]) -> None:
    """Raise ConfigError where Lightning refuses an argument of the Trainer.

    A Trainer is built and thrown away, before a run deletes or writes anything.
    options: as of `own_arguments`.
    """
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    build_trainer(config, options, Stop(), (), (), **quiet)


def build_trainer(
    config: TrainerConfig, options: Mapping[str, Any], stop: Stop, callbacks: Sequence[Callback],
    plugins: Sequence[Any], **arguments: Any,
) -> L.Trainer:  # fmt: skip
    """Return the Trainer of a configuration.

    options: as of `own_arguments`.
    stop: stopped when `trainer.max_time` is over.
    arguments: arguments of lightning.Trainer that a stage sets itself.

    Raises ConfigError where Lightning refuses an argument.
    """
    target, own_plugins = config.options["_target_"], listed(options, "plugins")
    rest = {key: x for key, x in options.items() if key not in ("plugins", "max_time")}
    is_alone = world().size == 1
    if not is_alone:
        rest["strategy"] = strategy()
    elif not any(isinstance(own, ClusterEnvironment) for own in own_plugins):
        # Lightning would count the tasks of the whole job in a batch script of Slurm.
        plugins = [*plugins, LightningEnvironment()]
    try:
        is_own = target != "lightning.Trainer"
        cls: Any = get_class(permitted(target, "trainer._target_") if is_own else target)
        require(issubclass(cls, L.Trainer), "trainer._target_", target, "lightning.Trainer, or a "
                "class derived from it")  # fmt: skip
        limit = [MaxTime(options["max_time"], stop)] if has(options, "max_time") else []
        trainer: L.Trainer = cls(
            accelerator=config.accelerator,
            devices=1 if is_alone else config.devices,
            num_nodes=1 if is_alone else config.num_nodes,
            precision=config.precision,
            log_every_n_steps=config.log_every_n_steps,
            callbacks=[*limit, *callbacks],
            plugins=[*plugins, *own_plugins],
            **{"enable_model_summary": False, **rest, **arguments},
        )
    except ConfigError:
        raise
    except Exception as error:  # what Lightning and the classes named here refuse is of any kind
        raise ConfigError(f"trainer: {reason(error)}") from error
    return trainer


@contextmanager
def misconfigured() -> Iterator[None]:
    """Raise ConfigError where Lightning refuses what the Trainer was given, and StorageError where
    a file cannot be read or written, as one of a logger."""
    try:
        yield
    except OSError as error:
        if error.filename is None or full_disk(error):
            raise
        raise StorageError(f"{error.filename} cannot be used: {error.strerror}") from error
    except MisconfigurationException as error:
        raise ConfigError(f"trainer or callbacks: {reason(error)}") from error


def has(options: Mapping[str, Any], key: str) -> bool:
    """Return whether the key is there and is not None."""
    return key in options and options[key] is not None


def listed(options: Mapping[str, Any], key: str) -> list[Any]:
    """Return the value as a list: a single object becomes one item, a missing value none."""
    if not has(options, key):
        return []
    return options[key] if isinstance(options[key], list) else [options[key]]


def built(node: Any, key: str, kind: type) -> Any:
    """Return the object that a section names. Raises ConfigError unless it is of type `kind`."""
    is_one = isinstance(node, Mapping) and "_target_" in node
    require(is_one, key, node, "a mapping with _target_ and the arguments of the class named there")
    found = instantiated(node, key)
    require(isinstance(found, kind), f"{key}._target_", node["_target_"], f"a {kind.__name__}")
    refuse_owned(key, found)
    return found


def instantiated(node: Mapping[str, Any], key: str) -> Any:
    """Return a section in which every mapping with `_target_` is an object.

    Raises ConfigError naming the key.
    """
    for value in node.values():
        if isinstance(value, str | Mapping | list):
            permitted(value, key)
    try:
        return instantiate(dict(node), _convert_="all")
    except Exception as error:  # a class of the user's own may raise anything
        raise ConfigError(f"{key}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Return the cause of an error in one line, without the text that Hydra adds."""
    cause = error.__cause__
    if isinstance(error, InstantiationException) and isinstance(cause, Exception):
        return reason(cause)
    if isinstance(error, ImportError) and isinstance(cause, Exception):
        return f"{first_line(error).rstrip(':')}: {reason(cause)}"
    return f"{first_line(error)} ({type(error).__name__})"
