"""Objects that a configuration names by `_target_`: callbacks, loggers, and the Trainer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
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
from lightning_rlhf.io import storage, user_code
from lightning_rlhf.modules import optim
from lightning_rlhf.parallel.world import world
from lightning_rlhf.runs import accelerator, folders
from lightning_rlhf.runs.stage import AUTO, FSDP, Settings, TrainerConfig, section

REFUSED: Mapping[tuple[type, ...], str] = {
    (lightnings.Checkpoint, CheckpointIO): "a run writes checkpoints from which it resumes exactly;"
    " checkpoint_every, checkpoint_minutes and checkpoints_kept in the section of the stage say "
    "when and how many",
    **optim.REFUSED,
}
"""Classes of Lightning that a run cannot use -> the reason, and what to use instead."""
TAKEN = "a value that lightning.Trainer takes, or a mapping with _target_"
STRATEGIES = ("ddp", FSDP)
"""Strategies of several processes; in one process, and for Lightning, they are auto."""
ALONE = "auto, ddp, fsdp, single_device: no strategy of Lightning's, as gradients are summed here"
"""Allowed values of an argument of the Trainer, and of its strategy."""


SET_BY_STAGE = {
    "lr": "{0}.lr is the learning rate",
    "weight_decay": "{0}.weight_decay is that of all matrices",
    "params": "{0}.finetune and model.lora say what is trained",
}
"""Arguments of an optimizer that a stage sets itself -> what to use instead."""


def own_objects(settings: Settings) -> dict[str, Any]:
    """Return the user's own callbacks, loggers and arguments of lightning.Trainer, by these names,
    and the optimizer.

    Callbacks are those of `trainer.callbacks` and of `callbacks`, where `callbacks.NAME=null` is
    none; `arguments` are all others of the section `trainer`. A Trainer is built with them and
    thrown away, before a run deletes or writes anything.
    Raises ConfigError naming the key where an object or argument cannot be used.
    """
    options = {key: x for key, x in settings.trainer.options.items() if key != "_target_"}
    arguments = instantiated(options, "trainer")
    found = [("trainer.callbacks", x) for x in listed(arguments.pop("callbacks", None))]
    nodes = {f"callbacks.{name}": node for name, node in settings.callbacks.items()}
    found += [(key, instantiated(node, key)) for key, node in nodes.items() if node is not None]
    custom = settings.custom_logger
    loggers = [] if custom is None else [("logger", instantiated(custom, "logger"))]
    for kind, ones in ((lightnings.Callback, found), (Logger, loggers)):
        for key, one in ones:
            is_one = isinstance(one, kind)
            require(is_one, key, one, f"a {kind.__name__}: a mapping with its class as _target_")
    plugins = [("trainer.plugins", x) for x in listed(arguments.get("plugins"))]
    for key, one in (*found, *plugins):
        optim.refuse_object(one, key, REFUSED)
    for key, value in arguments.items():
        require(not isinstance(value, Mapping), f"trainer.{key}", value, TAKEN)
    own = arguments.get("strategy")
    named = (None, AUTO, "single_device", *STRATEGIES)
    is_alone = own in named or isinstance(own, SingleDeviceStrategy)
    shown = own if isinstance(own, str) else type(own).__name__
    require(is_alone, "trainer.strategy", shown, ALONE)
    for _, logger in loggers:
        if (folder := logger.save_dir) is not None and "://" not in str(folder):
            folders.check_writable("logger.save_dir", Path(folder), Path(folder))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    build_trainer(settings.trainer, arguments, Stop(), **quiet)
    own = {"callbacks": [x for _, x in found], "loggers": [x for _, x in loggers]}
    return own | {"arguments": arguments, "optimizer": optimizer_class(settings)}


def optimizer_class(settings: Settings) -> partial[Any]:
    """Return the class of the section `optimizer` with its arguments; AdamW for an empty one.

    For a stage that trains, an optimizer of a matrix and a vector makes a step and is thrown away.
    Raises ConfigError naming the key where that is not possible.
    """
    own, config = settings.optimizer, settings.config
    if not own or not settings.definition.trains:
        return partial(torch.optim.AdamW)
    target = section({"optimizer": own}, "optimizer", "_target_")["_target_"]
    for name, meant in SET_BY_STAGE.items():
        if name in own:
            found, meant = f"optimizer.{name} is {own[name]!r}", meant.format(settings.stage)
            raise ConfigError(f"{found}, but it is not to be set: {meant}")
    make: partial[Any] = instantiated({**own, "_partial_": True}, "optimizer")
    groups = []
    for shape, decay in (((2, 2), config.weight_decay), ((2,), 0.0)):
        weight = torch.nn.Parameter(torch.zeros(shape, device=accelerator.device_of(settings)))
        weight.grad = torch.zeros_like(weight)
        groups.append({"params": [weight], "lr": config.lr, "weight_decay": decay})
    with optim.optimizer_faults():
        built = optim.build_with(make, groups, config, {*groups[0]["params"]})
        is_one = isinstance(built, torch.optim.Optimizer)
        require(is_one, "optimizer._target_", target, "a class of kind torch.optim.Optimizer")
        built.step()
    return make


def build_trainer(
    config: TrainerConfig, options: Mapping[str, Any], stop: Stop, **arguments: Any
) -> L.Trainer:
    """Return the Trainer of a configuration.

    options: `arguments` as of `own_objects`.
    stop: stopped when `trainer.max_time` is over.
    arguments: arguments of lightning.Trainer that a stage sets itself.

    Raises ConfigError where Lightning refuses an argument.
    """
    target, plugins = config.options["_target_"], listed(options.get("plugins"))
    given = {key: x for key, x in options.items() if key not in ("plugins", "max_time")}
    given = {"enable_model_summary": False, "num_nodes": 1, "devices": 1, **given, **arguments}
    if given.get("strategy") in STRATEGIES:
        given["strategy"] = AUTO
    if world().size > 1:
        given |= {"devices": config.devices, "num_nodes": config.num_nodes}
        given["strategy"] = accelerator.ReplicaStrategy()
    elif not any(isinstance(own, ClusterEnvironment) for own in plugins):
        # Lightning would count the tasks of the whole job in a batch script of Slurm.
        plugins = [LightningEnvironment(), *plugins]
    given["plugins"] = [*arguments.get("plugins", ()), *plugins]
    try:
        limit = [MaxTime(time, stop)] if (time := options.get("max_time")) is not None else []
        given["callbacks"] = [*limit, *arguments.get("callbacks", ())]
        is_own = target != "lightning.Trainer"
        cls: Any = get_class(user_code.permitted(target, "trainer._target_") if is_own else target)
        allowed = "lightning.Trainer, or a class derived from it"
        require(issubclass(cls, L.Trainer), "trainer._target_", target, allowed)
        trainer: L.Trainer = cls(
            accelerator=config.accelerator,
            precision=config.precision,
            log_every_n_steps=config.log_every_n_steps,
            **given,
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
        if error.filename is None or storage.full_disk(error):
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
            user_code.permitted(value, key)
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
        words = user_code.explain_missing(getattr(cause, "name", None)) or reason(cause)
        return f"{first_line(error).rstrip(':')}: {words}"
    return f"{first_line(error)} ({type(error).__name__})"
