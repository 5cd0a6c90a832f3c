"""Objects that a configuration names by `_target_`: callbacks, loggers, and the Trainer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_rlhf.callbacks.stop import Stop
from lightning_rlhf.callbacks.stopping import MaxTime
from lightning_rlhf.core.errors import ConfigError, StorageError, first_line, require
from lightning_rlhf.io.storage import full_disk
from lightning_rlhf.io.user_code import permitted
from lightning_rlhf.parallel.world import world
from lightning_rlhf.runs.accelerator import strategy
from lightning_rlhf.runs.folders import check_writable
from lightning_rlhf.runs.stage import AUTO, Settings, TrainerConfig

_BATCHES = "microbatch_size in the section of the stage splits a batch"
_CHECKPOINTS = (
    "a run writes checkpoints from which it resumes exactly; checkpoint_every, checkpoint_minutes "
    "and checkpoints_kept in the section of the stage say when and how many"
)
_TRAINED = "lr, ema_decay, finetune and model.lora say how the weights are trained"
REFUSED: Mapping[type, str] = {
    **dict.fromkeys((lightnings.Checkpoint, CheckpointIO), _CHECKPOINTS),
    **dict.fromkeys(
        (lightnings.GradientAccumulationScheduler, lightnings.BatchSizeFinder), _BATCHES
    ),
    **dict.fromkeys(
        (lightnings.StochasticWeightAveraging, lightnings.WeightAveraging, lightnings.ModelPruning,
         lightnings.BaseFinetuning, lightnings.LearningRateFinder), _TRAINED,
    ),
}  # fmt: skip
"""Class of Lightning that a run cannot use -> the reason, and what to use instead."""


def own_objects(settings: Settings) -> dict[str, Any]:
    """Return the user's own callbacks, loggers and arguments of lightning.Trainer, by these names.

    Callbacks are those of `trainer.callbacks` and of `callbacks`, where `callbacks.NAME=null` is
    none; `arguments` are all others of the section `trainer`. A Trainer is built with them and
    thrown away, before a run deletes or writes anything.
    Raises ConfigError naming the key where an object or argument cannot be used.
    """
    options = {key: x for key, x in settings.trainer.options.items() if key != "_target_"}
    arguments = instantiated(options, "trainer")
    found = [("trainer.callbacks", x) for x in listed(arguments.pop("callbacks", None))]
    for name, node in settings.callbacks.items():
        if node is not None:
            found.append((f"callbacks.{name}", instantiated(node, f"callbacks.{name}")))
    checked: list[tuple[str, Any, type]] = [(key, x, lightnings.Callback) for key, x in found]
    loggers = []
    if settings.custom_logger is not None:
        loggers.append(logger := instantiated(settings.custom_logger, "logger"))
        checked.append(("logger", logger, Logger))
    for key, one, kind in checked:
        is_one = isinstance(one, kind)
        require(is_one, key, one, f"a {kind.__name__}: a mapping with its class as _target_")
    plugins = [("trainer.plugins", x) for x in listed(arguments.get("plugins"))]
    for key, one in (*found, *plugins):
        for refused, why in REFUSED.items():
            if isinstance(one, refused):
                name = type(one).__name__
                raise ConfigError(f"{key} is a {name}, which is not to be set: {why}")
    for key, value in arguments.items():
        require(not isinstance(value, Mapping), f"trainer.{key}", value,
                "a value that lightning.Trainer takes, or a mapping with _target_")  # fmt: skip
    own = arguments.get("strategy")
    is_alone = own in (None, AUTO, "single_device") or isinstance(own, SingleDeviceStrategy)
    allowed = "auto, single_device: the processes of a run sum their gradients themselves"
    shown = own if isinstance(own, str) else type(own).__name__
    require(is_alone, "trainer.strategy", shown, allowed)
    for logger in loggers:
        if (folder := logger.save_dir) is not None and "://" not in str(folder):
            check_writable("logger.save_dir", Path(folder), Path(folder))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    build_trainer(settings.trainer, arguments, Stop(), (), (), **quiet)
    return {"callbacks": [x for _, x in found], "loggers": loggers, "arguments": arguments}


def build_trainer(
    config: TrainerConfig, options: Mapping[str, Any], stop: Stop,
    callbacks: Sequence[lightnings.Callback], plugins: Sequence[Any], **arguments: Any,
) -> L.Trainer:  # fmt: skip
    """Return the Trainer of a configuration.

    options: `arguments` as of `own_objects`.
    stop: stopped when `trainer.max_time` is over.
    arguments: arguments of lightning.Trainer that a stage sets itself.

    Raises ConfigError where Lightning refuses an argument.
    """
    target, own_plugins = config.options["_target_"], listed(options.get("plugins"))
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
        limit = [MaxTime(time, stop)] if (time := options.get("max_time")) is not None else []
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


def listed(value: Any) -> list[Any]:
    """Return a value as a list: a single object becomes one item, None none."""
    return value if isinstance(value, list) else [] if value is None else [value]


def instantiated(node: Any, key: str) -> Any:
    """Return a section in which every mapping with `_target_` is an object.

    Raises ConfigError naming the key.
    """
    require(isinstance(node, Mapping), key, node, "a mapping with _target_ and its arguments")
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
