"""Validation of values by pydantic: types with bounds, and one-line messages for refused values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic import ValidationError as PydanticError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lightning_rlhf.core.errors import ConfigError, refused, require, unknown_key

T = TypeVar("T")

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)
"""Configuration of every validated dataclass: 2 is a float, and True is no integer."""
LARGEST = 2**53
"""Largest integer; above it, floats do not represent every integer."""
MOST = 1_000_000
"""Largest number of rows or other things that are held in memory at once."""
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _usable(text: str) -> str:
    """Return `text` if it can name a file, a folder or a model.

    Such a text is not empty, has no control characters or halves of surrogate pairs, and is no
    longer than file systems allow: 255 bytes between two slashes, 4095 in all.
    """
    if (
        text.strip() == ""
        or re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text)
        or len(text.encode()) > 4095
        or any(len(part.encode()) > 255 for part in text.split("/"))
    ):
        raise ValueError("the text cannot name a file")
    return text


def described(words: str) -> FieldInfo:
    """Return an annotation that describes in `words` which values a field takes."""
    return Field(description=words)  # type: ignore[no-any-return]


PositiveInt = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=MOST)]
"""Number of things that are held in memory at once."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Temperature = Annotated[float, Field(ge=1e-6)]
"""Divisor of logits; a smaller one takes them beyond what float32 holds."""
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, AfterValidator(_usable), described("text")]
"""Text that can name a file, a folder or a model."""
Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(strict=False),
    described("a list of texts, none of them empty"),
]
"""Tuple of texts that are not empty; a list of the configuration becomes a tuple."""
Options = Annotated[dict[str, Any], described("a mapping of names to values")]


def section(cls: type[T]) -> BeforeValidator:
    """Return an annotation with which a field of type `cls` also takes a mapping of its keys."""
    return BeforeValidator(lambda node: _construct(cls, node) if _is_mapping(node) else node)


def build(cls: type[T], node: Any, key: str) -> T:
    """Return `cls(**node)`, where `node` is the section `key` of a configuration.

    Raises ConfigError naming the key, what was found and what is allowed.
    """
    require(_is_mapping(node), key, node, "a mapping of keys to values")
    try:
        return _construct(cls, node)
    except PydanticError as error:
        message = _message(error, cls, node, key)
    raise ConfigError(message)  # without pydantic's own message, which shows secrets


def check_value(key: str, found: Any, kind: Any) -> None:
    """Raise ConfigError naming `key` unless `found` is of the type `kind`, bounds included."""
    if not fits(found, kind):
        raise ConfigError(refused(key, found, allowed(kind, found)))


def fits(found: Any, kind: Any) -> bool:
    """Return whether `found` is of the type `kind`, bounds included."""
    try:
        TypeAdapter(kind, config=STRICT).validate_python(found)
    except PydanticError:
        return False
    return True


class RuleError(ValueError):
    """A rule between the fields of a section that does not hold."""

    def __init__(self, words: Callable[[str], str]) -> None:
        """words: what is written before the name of a field, such as "ppo." -> message."""
        super().__init__(words(""))
        self.words = words


def rule(holds: bool, field: str, found: Any, allowed: str) -> None:
    """Raise RuleError unless it holds, in the `__post_init__` of a validated dataclass.

    `build` turns it into a ConfigError, with the key of the section before the name of the field.
    """
    if not holds:
        raise RuleError(lambda section: refused(f"{section}{field}", found, allowed))


def check_divides(small_field: str, small: int, large_field: str, large: int) -> None:
    """Raise RuleError, as `rule` does, unless `small` divides `large`."""
    if large % small:
        divisors = ", ".join(str(n) for n in range(1, large + 1) if large % n == 0)
        raise RuleError(
            lambda section: (
                f"{section}{large_field} is {large}, which {section}{small_field} = "
                f"{small} does not divide; allowed for {section}{small_field}: {divisors}"
            )
        )


def refuse_unknown(node: Mapping[Any, Any], known: Collection[str], prefix: str) -> None:
    """Raise ConfigError for a key that nothing reads."""
    for key in node:
        if key not in known:
            raise ConfigError(unknown_key(str(key), known, prefix, node))


def allowed(hint: Any, found: Any = None) -> str:
    """Return in words which values the type `hint` takes.

    Limits of memory and of counting are named only where the number `found` is beyond them.
    """
    kind, bounds, description = _parts(hint)
    if description is not None:
        return description
    if get_origin(kind) in (Union, UnionType):
        *_, member = (member for member in get_args(kind) if member is not NoneType)
        words = allowed(Annotated[member, *bounds] if bounds else member, found)
        return f"{words}, or null" if NoneType in get_args(kind) else words
    if get_origin(kind) is Literal:
        return ", ".join("null" if value is None else str(value) for value in get_args(kind))
    if kind is bool:
        return "true, false"
    if dataclasses.is_dataclass(kind):
        return "a mapping of keys to values"
    if kind not in (int, float):
        return str(getattr(kind, "__name__", kind))
    limits = [
        f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}"
        for bound in bounds
        for name, sign in _SIGNS.items()
        if hasattr(bound, name)
        for limit in [getattr(bound, name)]
        if kind is float or limit not in (MOST, LARGEST) or _is_above(found, limit)
    ]
    return " and ".join(["a whole number" if kind is int else "a number", *limits])


def _construct(cls: type[T], node: Mapping[Any, Any]) -> T:
    return cls(**{str(key): value for key, value in node.items()})


def _is_mapping(node: Any) -> bool:
    return isinstance(node, Mapping)


def _is_above(found: Any, limit: int) -> bool:
    return isinstance(found, int) and found > limit


def _parts(hint: Any) -> tuple[Any, list[Any], str | None]:
    """Return the type inside `Annotated`, its bounds, and its description if it has one."""
    if get_origin(hint) is not Annotated:
        return hint, [], None
    kind, *notes = get_args(hint)
    bounds: list[Any] = []
    description = None
    for note in notes:
        bounds += note.metadata if isinstance(note, FieldInfo) else [note]
        if isinstance(note, FieldInfo) and note.description is not None:
            description = note.description
    return kind, bounds, description


def _message(error: PydanticError, cls: type, node: Mapping[Any, Any], key: str) -> str:
    """Return one line about the first error, unknown keys before others, and the other keys."""
    details = error.errors(include_url=False)
    order = ("unexpected_keyword_argument", "missing")
    details.sort(key=lambda d: order.index(d["type"]) if d["type"] in order else len(order))
    lines: dict[str, str] = {}
    for detail in details:
        named, line = _line(detail, cls, node, key)
        lines.setdefault(named, line)
    (_, first), *others = lines.items()
    if not others:
        return first
    shown = ", ".join(name for name, _ in others[:3]) + ", ..." * (len(others) > 3)
    return f"{first} (and {len(others)} more: {shown})"


def _line(detail: ErrorDetails, cls: Any, node: Any, key: str) -> tuple[str, str]:
    """Return the key of an error and its message.

    cls: class of the section `key`; node: the section, from which it was to be built.
    """
    rest = list(detail["loc"])
    hint: Any = cls
    while rest:
        part = rest[0]
        if dataclasses.is_dataclass(hint) and isinstance(node, Mapping):
            name = str(part)
            if detail["type"] == "unexpected_keyword_argument" and len(rest) == 1:
                known = [field.name for field in dataclasses.fields(hint)]
                return f"{key}.{name}", unknown_key(name, known, f"{key}.", node)
            if detail["type"] == "missing" and len(rest) == 1:
                return f"{key}.{name}", f"{key}.{name} is missing from the configuration"
            key, node = f"{key}.{name}", node[name]
            hint = get_type_hints(hint, include_extras=True)[name]
        elif isinstance(part, int) and _is_section(_item(hint)):
            key, node, hint = f"{key}[{part}]", node[part], _item(hint)
        else:
            break
        rest.pop(0)
        hint = _parts(hint)[0] if _is_section(hint) else hint
    if detail["type"] == "value_error" and dataclasses.is_dataclass(hint):
        broken = detail["ctx"]["error"]
        return key, broken.words(f"{key}.") if isinstance(broken, RuleError) else f"{key}.{broken}"
    found = detail["input"] if rest and all(isinstance(part, int) for part in rest) else node
    return key, refused(key, found, allowed(hint, found))


def _is_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(_parts(hint)[0])


def _item(hint: Any) -> Any:
    """Return the type of the items of `tuple[T, ...]`; None of another type."""
    kind = _parts(hint)[0]
    return get_args(kind)[0] if get_origin(kind) is tuple else None
