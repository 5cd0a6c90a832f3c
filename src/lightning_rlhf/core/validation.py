"""Validation of values by pydantic: types with bounds, and one-line messages for refused values."""

import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic import ValidationError as PydanticError
from pydantic.fields import FieldInfo

from lightning_rlhf.core.errors import ConfigError, refusal, require, unknown_key

T = TypeVar("T")

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)
"""Configuration of every validated dataclass: 2 is a float, and True is no integer."""
LARGEST = 2**53
"""Largest integer; above it, floats do not represent every integer."""
MOST = 1_000_000
"""Largest number of rows or other things that are held in memory at once."""
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _usable(text: str) -> str:
    """Return `text` if it can name a file, a folder or a model: one that is not empty, without
    control characters, and no longer than file systems allow."""
    parts = text.encode(errors="replace").split(b"/")
    is_plain = text.strip() and not re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text)
    if not is_plain or max(map(len, parts)) > 255:
        raise ValueError("the text cannot name a file")
    return text


def described(words: str) -> FieldInfo:
    """Return an annotation that describes in `words` which values a field takes."""
    return Field(description=words)  # type: ignore[no-any-return]


def name_or_path(*names: str, kind: str) -> FieldInfo:
    """Return an annotation of a text that is one of the names, or the path of a user's object.

    kind: kind of the object as a path ends with it: Class, function.
    """
    paths = f"'path/to/file.py:{kind}' or 'package.module:{kind}'"
    words = f"{', '.join(names)}, {paths}"
    pattern = rf"^({'|'.join(map(re.escape, names))})$|:"
    return Field(pattern=pattern, description=words)  # type: ignore[no-any-return]


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
Text = Annotated[str, Field(max_length=4095, description="text"), AfterValidator(_usable)]
"""Text that can name a file, a folder or a model."""
Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(strict=False, description="a list of texts, none of them empty"),
]
"""Tuple of texts that are not empty; a list of the configuration becomes a tuple."""
OneOrMore = Annotated[
    Texts, BeforeValidator(lambda found: (found,) if isinstance(found, str) else found)
]
"""Tuple of texts, for which a single text may stand."""
Options = Annotated[dict[str, Any], described("a mapping of names to values")]


def nested(cls: type[T]) -> BeforeValidator:
    """Return an annotation with which a field of type `cls` also takes a mapping of its keys."""
    return BeforeValidator(lambda node: cls(**node) if isinstance(node, Mapping) else node)


def build(cls: type[T], node: Any, key: str) -> T:
    """Return `cls(**node)`, where `node` is the section `key` of a configuration.

    A field that is another validated dataclass, or a tuple of them, is built of the section in it.

    Raises ConfigError naming the key, what was found and what is allowed: for the first refused
    key, those of a section in it before all, then unknown ones; the other keys are named.
    """
    if isinstance(node, cls):
        return node
    require(isinstance(node, Mapping), key, node, "a mapping of keys to values")
    hints, kinds = get_type_hints(cls, include_extras=True), get_type_hints(cls)
    values = {str(name): value for name, value in node.items()}
    for name, value in values.items():
        kind: Any = kinds.get(name)
        item: Any = get_args(kind)[0] if get_origin(kind) is tuple else None
        where = f"{key}.{name}"
        is_section, is_list = is_dataclass(kind), is_dataclass(item) and isinstance(value, list)
        if is_section:
            values[name] = build(kind, value, where)
        elif is_list:
            values[name] = [build(item, one, f"{where}[{i}]") for i, one in enumerate(value)]
    try:
        return cls(**values)
    except PydanticError as error:  # is not raised from here, since it shows secrets
        details = error.errors(include_url=False)
    order = {"unexpected_keyword_argument": 0, "missing": 1}
    refusals: dict[str, str] = {}
    for detail in sorted(details, key=lambda detail: order.get(detail["type"], 2)):
        place = detail["loc"]
        name = str(place[0]) if place else ""
        where = f"{key}.{name}"
        match detail["type"]:
            case "unexpected_keyword_argument":
                known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
                reason = unknown_key(name, known, f"{key}.", node)
            case "missing":
                reason = f"{where} is missing from the configuration"
            case _ if not name:  # a rule of __post_init__
                reason = f"{key}.{detail['ctx']['error']}"
            case _:
                found = detail["input"] if isinstance(place[-1], int) else values[name]
                reason = refusal(where, found, allowed(hints[name]))
        refusals.setdefault(where, reason)
    (_, first), *others = refusals.items()
    shown = ", ".join(name for name, _ in others[:3]) + ", ..." * (len(others) > 3)
    raise ConfigError(f"{first} (and {len(others)} more: {shown})" if others else first)


def check_value(key: str, found: Any, kind: Any) -> None:
    """Raise ConfigError naming `key` unless `found` is of the type `kind`, bounds included."""
    try:
        TypeAdapter(kind, config=STRICT).validate_python(found)
    except PydanticError:
        raise ConfigError(refusal(key, found, allowed(kind))) from None


def rule(holds: bool, field: str, found: Any, allowed: str) -> None:
    """Raise ValueError unless it holds, in the `__post_init__` of a validated dataclass.

    `build` turns it into a ConfigError, with the key of the section before the name of the field.
    """
    if not holds:
        raise ValueError(refusal(field, found, allowed))


def check_divides(config: Any, small: str, large: str) -> None:
    """Raise ValueError, as `rule` does, unless field `small` divides `large`, or is "auto"."""
    part, whole = getattr(config, small), getattr(config, large)
    if part != "auto" and whole % part:
        divisors = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        rule(False, small, part, f"{divisors}, which divide {large} = {whole}")


def refuse_unknown(node: Mapping[Any, Any], known: Collection[str], prefix: str) -> None:
    """Raise ConfigError for a key that nothing reads."""
    for key in node:
        if key not in known:
            raise ConfigError(unknown_key(str(key), known, prefix, node))


def allowed(hint: Any) -> str:
    """Return in words which values the type `hint` takes."""
    kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if words := [n.description for n in notes if isinstance(n, FieldInfo) and n.description]:
        return words[-1]
    if get_origin(kind) in (Union, UnionType):
        *_, member = (member for member in get_args(kind) if member is not NoneType)
        of_member = allowed(Annotated[member, *notes] if notes else member)
        return f"{of_member}, or null" if NoneType in get_args(kind) else of_member
    if get_origin(kind) is Literal:
        return ", ".join("null" if value is None else str(value) for value in get_args(kind))
    if kind not in (int, float):
        return "true, false" if kind is bool else str(getattr(kind, "__name__", kind))
    bounds = [b for n in notes for b in (n.metadata if isinstance(n, FieldInfo) else [n])]
    limits = [(sign, getattr(bound, name)) for bound in bounds for name, sign in _SIGNS.items()
              if hasattr(bound, name) and getattr(bound, name) != LARGEST]  # fmt: skip
    named = (f"{sign} {x:g}" if isinstance(x, float) else f"{sign} {x}" for sign, x in limits)
    return " and ".join(["a whole number" if kind is int else "a number", *named])
