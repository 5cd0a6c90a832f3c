"""Objects that a configuration names by `_target_`: callbacks, loggers, and the Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from lightning_rlhf.callbacks.max_time import MaxTime
from lightning_rlhf.callbacks.stop import Stop
from lightning_rlhf.core.errors import ConfigError, first_line, require
from lightning_rlhf.stages.stage import Settings, TrainerConfig


def own_callbacks(settings: Settings) -> list[Callback]:
    """Return the callbacks of the section `callbacks`. Raises ConfigError naming the key."""
    return [built(node, f"callbacks.{name}", Callback) for name, node in settings.callbacks.items()]


def own_loggers(settings: Settings) -> list[Logger]:
    """Return the logger that the section `logger` names by `_target_`, if it does."""
    node = settings.custom_logger
    return [] if node is None else [built(node, "logger", Logger)]


def build_trainer(
    config: TrainerConfig, stop: Stop, callbacks: Sequence[Callback], plugins: Sequence[Any],
    **arguments: Any,
) -> L.Trainer:  # fmt: skip
    """Return the Trainer of a configuration.

    stop: stopped when `trainer.max_time` is over.
    arguments: arguments of lightning.Trainer that a stage sets itself.

    Raises ConfigError where Lightning refuses an argument.
    """
    target, options = config.options["_target_"], dict(config.options)
    del options["_target_"]
    try:
        options = instantiate(options, _convert_="all")
        cls: Any = get_class(target)
        require(issubclass(cls, L.Trainer), "trainer._target_", target, "lightning.Trainer, or a "
                "class derived from it")  # fmt: skip
        limit = [MaxTime(options.pop("max_time"), stop)] if has(options, "max_time") else []
        more = {key: options.pop(key) for key in ("callbacks", "plugins") if has(options, key)}
        trainer: L.Trainer = cls(
            accelerator=config.accelerator,
            devices=config.devices,
            precision=config.precision,
            log_every_n_steps=config.log_every_n_steps,
            callbacks=[*listed(more, "callbacks"), *limit, *callbacks],
            plugins=[*plugins, *listed(more, "plugins")],
            **{"enable_model_summary": False, **options},
            **arguments,
        )
    except ConfigError:
        raise
    except Exception as error:  # what Lightning and the classes named here refuse is of any kind
        raise ConfigError(f"trainer: {reason(error)}") from error
    return trainer


def has(options: Mapping[str, Any], key: str) -> bool:
    """Return whether the key is there and is not None."""
    return key in options and options[key] is not None


def listed(options: Mapping[str, Any], key: str) -> list[Any]:
    """Return the value as a list: a single object becomes one item, a missing value none."""
    if key not in options:
        return []
    return options[key] if isinstance(options[key], list) else [options[key]]


def built(node: Any, key: str, kind: type) -> Any:
    """Return the object that a section names. Raises ConfigError unless it is of type `kind`."""
    is_one = isinstance(node, Mapping) and "_target_" in node
    require(is_one, key, node, "a mapping with _target_ and the arguments of the class named there")
    try:
        found = instantiate(dict(node), _convert_="all")
    except Exception as error:  # a class of the user's own may raise anything
        raise ConfigError(f"{key}: {reason(error)}") from error
    require(isinstance(found, kind), f"{key}._target_", node["_target_"], f"a {kind.__name__}")
    return found


def reason(error: Exception) -> str:
    """Return the cause of an error in one line, without the text that Hydra adds."""
    cause = error.__cause__
    if isinstance(error, InstantiationException) and isinstance(cause, Exception):
        return reason(cause)
    return f"{first_line(error)} ({type(error).__name__})"
