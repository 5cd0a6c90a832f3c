"""Functions of the user's own, named in the configuration."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_rlhf.core.errors import ConfigError, require

FAULTS = (Exception, SystemExit, GeneratorExit, CancelledError)
"""What a user's own code may raise that is a fault of it: all but Ctrl-C. `sys.exit()` there would
end a run with status 0."""
ALLOWED = "'path/to/file.py:function' or 'package.module:function'"


def load_function(source: str, key: str) -> Callable[..., Any]:
    """The function that `source` names: `path/to/file.py:function` or `package.module:function`.

    A file is executed once in a process, as a module is, under a name made from its whole path:
    two files that are called alike do not meet.

    Args:
        source: what the configuration says.
        key: where it says so.

    Raises:
        ConfigError: where `source` does not lead to a function.
    """
    check_function_file(source, key)
    where, _, name = source.rpartition(":")
    is_file = where.endswith(".py")
    path = os.path.expanduser(where) if is_file else where
    told = f"{key} is {source!r}; "
    found = vars(_file(path, told) if is_file else _module(path, told))
    if name in found and callable(found[name]):
        function: Callable[..., Any] = found[name]
        return function
    there = sorted(n for n, value in found.items() if _is_own(value, found) and n[0] != "_")
    what = f"; {name} is {found[name]!r}" if name in found else ""
    raise ConfigError(f"{told}{path} has no function {name!r}, it has {there}{what}")


def check_function_file(source: str, key: str) -> None:
    """Raise ConfigError unless `source` has the form of a function's, and its file is there.

    Runs no code; `load_function` tells the rest.
    """
    require(isinstance(source, str), key, source, ALLOWED)
    where, _, name = source.rpartition(":")
    require(bool(where and name), key, source, ALLOWED)
    path = Path(os.path.expanduser(where)).resolve()
    if where.endswith(".py") and not path.is_file():
        raise ConfigError(f"{key} is {source!r}; there is no file {path}")


def _is_own(value: Any, found: dict[str, Any]) -> bool:
    """Whether it can be called and was not imported from elsewhere."""
    return callable(value) and getattr(value, "__module__", None) == found["__name__"]


def _file(path: str, told: str) -> ModuleType:
    where = Path(path).resolve()
    name = f"{where.stem}_{hashlib.sha256(str(where).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the names of their annotations
    try:
        spec.loader.exec_module(module)
    except FAULTS as error:
        del sys.modules[name]
        raise ConfigError(f"{told}{path} fails: {error!r}") from error
    return module


def _module(name: str, told: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except FAULTS as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{told}there is no module {missing!r} on PYTHONPATH; allowed: {ALLOWED}"
            ) from error
        raise ConfigError(f"{told}{name} fails: {error!r}") from error
