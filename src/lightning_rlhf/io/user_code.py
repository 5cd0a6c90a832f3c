"""Code that is imported by name: objects of the user's, and the libraries that extras install."""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from asyncio import CancelledError
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_rlhf.core.errors import ConfigError, quoted, require

FAULTS = (Exception, SystemExit, GeneratorExit, CancelledError)
"""Exceptions that count as a fault of a user's code: all but Ctrl-C. `sys.exit()` there would end a
run with status 0."""
_NAMES = {"function": "function", "class": "Class", "rule": "RULE", "stage": "STAGE"}
FORMS = {
    kind: f"'path/to/file.py:{name}' or 'package.module:{name}'" for kind, name in _NAMES.items()
}
"""Kind of an object -> how one is named in a configuration."""
_given: Collection[str] | None = None
"""Code that the command line of a command that reads a folder names; None where the configuration
is the user's own."""


@contextmanager
def code_of_command(names: Collection[str] = ()) -> Iterator[None]:
    """Use no code and no address inside but `names`, whatever the files of a folder name."""
    global _given
    before, _given = _given, [*names, *(_given or ())]
    try:
        yield
    finally:
        _given = before


def permitted(source: Any, key: str) -> Any:
    """Return the source to use: what the command line gives under its name, in a folder's place.

    Raises ConfigError where the configuration is that of a folder, and the command line gives none.
    """
    name = str(source).rpartition(":")[2]
    found = [source] if _given is None else [x for x in _given if x.rpartition(":")[2] == name]
    if not found:
        raise ConfigError(
            f"{key} is {source!r}, which a folder names: what it names is not run; allowed: your "
            f"own code of that name, --code FILE.py:{name}"
        )
    return found[0]


def optional(module: str, extra: str, user: str) -> ModuleType:
    """Return a module of a library that an extra of this package installs.

    user: key and value, or command, that needs it.

    Raises ConfigError that says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        install = f"pip install 'lightning-rlhf[{extra}]'"
        raise ConfigError(f"{user} needs {error.name or module}: {install}") from error


def user_number(found: Any) -> float:
    """Return a number of a user's code; raise TypeError for a text, which float() would read."""
    if isinstance(found, str | bytes):
        raise TypeError(f"{found!r} is a text")
    return float(found)


def place_of(error: BaseException, owner: Any) -> str:
    """Return " at FILE:LINE", the last line that an error passed of a file, or of a function's.

    owner: the path or the function. Returns an empty text where no line of it was passed.
    """
    if callable(owner):
        owner = getattr(getattr(inspect.unwrap(owner), "__code__", None), "co_filename", "")
    file = str(owner)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    return f" at {Path(file).name}:{lines[-1]}" if lines else ""


def load_function(source: str, key: str) -> Callable[..., Any]:
    """Return the function that `source` names; raises ConfigError as `load_object` does."""
    function: Callable[..., Any] = load_object(source, key, "function", callable)
    return function


def load_object(source: str, key: str, what: str, is_one: Callable[[Any], bool]) -> Any:
    """Return the object that `source` names: `path/to/file.py:name` or `package.module:name`.

    A file is executed once in a process, like a module, under a name made from its whole path, so
    that two files of the same name do not collide.

    Args:
        source: value in the configuration.
        key: key of that value.
        what: kind of the object, one of FORMS, for the error.
        is_one: function that returns whether an object is of that kind.

    Raises ConfigError where `source` does not lead to such an object.
    """
    source = permitted(source, key)
    where, _, name = source.rpartition(":") if isinstance(source, str) else ("", "", "")
    require(bool(where and name), key, source, FORMS[what])
    path = Path(os.path.expanduser(where)).resolve()
    if where.endswith(".py") and not path.is_file():
        raise ConfigError(f"{key} is {source!r}; there is no file {path}")
    try:
        module = _of_file(where) if where.endswith(".py") else importlib.import_module(where)
    except FAULTS as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        file = path if where.endswith(".py") else file_of_module(where)
        fault = repr(error)
        if isinstance(error, SyntaxError) and error.filename == str(file):
            fault = f"SyntaxError: {error.msg}"
        reason = f"{where} fails{place_of(error, file)}: {fault}"
        if missing is not None and f"{where}.".startswith(f"{missing}."):
            reason = f"there is no module {missing!r} on PYTHONPATH; allowed: {FORMS[what]}"
        raise ConfigError(f"{key} is {source!r}; {reason}") from error
    found = {n: x for n, x in vars(module).items() if is_one(x)}
    if name in found:
        return found[name]
    own = module.__name__
    others = {n for n, x in found.items() if callable(x) and getattr(x, "__module__", None) != own}
    others -= {*getattr(module, "__all__", ())}
    names = sorted(n for n in found.keys() - others if n[0] != "_")
    shown = f"; {name} is {vars(module)[name]!r}" if name in vars(module) else ""
    has = f"{where} has no {what} {name!r}, it has {quoted(names)}{shown}"
    raise ConfigError(f"{key} is {source!r}; {has}")


def _of_file(path: str) -> ModuleType:
    """Return the module of a file, executed once in a process."""
    where = Path(os.path.expanduser(path)).resolve()
    name = f"{where.stem}_{hashlib.sha256(str(where).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(name, where)
        # Dataclasses look up the names in their annotations there.
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except FAULTS:
            del sys.modules[name]
            raise
    return sys.modules[name]


def enter_formulas(formulas: Mapping[str, tuple[Any, Any, str]], config: Any, stage: str) -> None:
    """Enter the functions of the user's that a section names in the tables of formulas.

    formulas: key -> table of named functions; function that tries one with the section and returns
        what is wrong, as the end of "FUNCTION, ...", or None; description of those that pass.

    Raises ConfigError where there is no such function, or where it fails or has a fault.
    """
    for key, (table, fault_of, allowed) in formulas.items():
        source = getattr(config, key)
        if ":" not in source:
            continue
        function = load_function(source, f"{stage}.{key}")
        try:
            fault = fault_of(function, config=config)
        except FAULTS as error:
            fault = f"which fails{place_of(error, function)} on a made-up batch: {error!r}"
        if fault is not None:
            raise ConfigError(f"{stage}.{key} is {source!r}, {fault}; allowed: {allowed}")
        table[source] = function


def code_digest(source: str) -> str:
    """Return a hash of the file that the path of an object names; of nothing where there is none.

    source: as for `load_object`; no package of it is imported, and one is all of its files.
    """
    where = os.path.expanduser(source.rpartition(":")[0])
    file = Path(where) if where.endswith(".py") else file_of_module(where)
    files = [file] if file is not None and file.is_file() else []
    if file is not None and file.name == "__init__.py":
        files = sorted(file.parent.glob("*.py"))
    return hashlib.sha256(b"".join(one.read_bytes() for one in files)).hexdigest()


ENDS = ("/__init__.py", ".py", *EXTENSION_SUFFIXES)
"""Ends of the files of a module."""


def file_of_module(name: str) -> Path | None:
    """Return the file of a module, of which no package is imported; None where there is none."""
    inside = name.replace(".", "/")
    files = (Path(place, inside + end) for place in sys.path for end in ENDS)
    return next(filter(Path.is_file, files), None)


def explain_missing(path: str | None) -> str:
    """Return what an imported module lacks of a dotted path; "" where there is no such module."""
    where, _, name = (path or "").rpartition(".")
    close = difflib.get_close_matches(name, dir(sys.modules.get(where)), n=1)
    found = f"module {where} has no {name}{''.join(f'; did you mean {x}?' for x in close)}"
    return found if where in sys.modules else ""


def nearest_path(source: str) -> str:
    """Return what exists in place of a missing path, as the continuation of a message.

    The first part of the path that does not exist is compared with the names beside it. Returns
    "; the nearest is PATH" where one is alike, else an empty text.
    """
    path = Path(os.path.expanduser(source))
    missing = next((p for p in (*reversed(path.parents), path) if not os.path.exists(p)), None)
    if missing is None:
        return ""
    above = missing.parent
    entries = sorted(above.glob("*"))  # none where it cannot be listed
    names = [p.name for p in entries if p.is_dir() or p.suffix == path.suffix != ""]
    if close := difflib.get_close_matches(missing.name, names, 1, 0.8 if path.suffix else 0.6):
        whole = above / close[0] / path.relative_to(missing)
        return f"; the nearest is {whole if whole.exists() else above / close[0]}"
    return ""
