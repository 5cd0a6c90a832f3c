"""Validation of values by pydantic: types with bounds, and one-line messages for refused values."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic import ValidationError as PydanticError
from pydantic.fields import FieldInfo

from lightning_rlhf.core.errors import ConfigError, refusal, unknown_key

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


def nested(cls: type[T]) -> BeforeValidator:
    """Return an annotation with which a field of type `cls` also takes a mapping of its keys."""
    return BeforeValidator(lambda node: cls(**node) if isinstance(node, Mapping) else node)


def build(cls: type[T], node: Any, key: str) -> T:
    """Return `cls(**node)`, where `node` is the section `key` of a configuration.

    A field that is another validated dataclass, or a tuple of them, is built of the section in it.

    Raises ConfigError naming the key, what was found and what is allowed: for the first refused
    key, unknown ones before others; the other keys are named.
    """
    refusals: dict[str, str] = {}
    built = _built(cls, node, key, refusals)
    if not refusals:
        return built  # type: ignore[no-any-return]
    (_, first), *others = refusals.items()
    shown = ", ".join(name for name, _ in others[:3]) + ", ..." * (len(others) > 3)
    raise ConfigError(f"{first} (and {len(others)} more: {shown})" if others else first)


def _built(cls: Any, node: Any, key: str, refusals: dict[str, str]) -> Any:
    """Return the section `key`, or add key -> message to `refusals` for what is refused in it."""
    if isinstance(node, cls):
        return node
    if not isinstance(node, Mapping):
        refusals[key] = refusal(key, node, "a mapping of keys to values")
        return None
    hints = get_type_hints(cls, include_extras=True)
    values = {str(name): value for name, value in node.items()}
    inside: dict[str, dict[str, str]] = {}
    for name, value in values.items():
        kind, where = _parts(hints.get(name))[0], f"{key}.{name}"
        found = inside.setdefault(name, {})
        item = get_args(kind)[0] if get_origin(kind) is tuple else None
        if dataclasses.is_dataclass(kind):
            values[name] = _built(kind, value, where, found)
        elif dataclasses.is_dataclass(item) and isinstance(value, list):
            numbered = enumerate(value)
            values[name] = [_built(item, one, f"{where}[{i}]", found) for i, one in numbered]
    try:
        return cls(**values)
    except PydanticError as error:  # is not raised from here, since it shows secrets
        details = error.errors(include_url=False)
    order = ("unexpected_keyword_argument", "missing")
    details.sort(key=lambda d: order.index(d["type"]) if d["type"] in order else len(order))
    for detail in details:
        name = str(detail["loc"][0]) if detail["loc"] else ""
        where, value = f"{key}.{name}", values.get(name)
        if not name:  # a rule of __post_init__
            broken = detail["ctx"]["error"]
            is_ours = isinstance(broken, RuleError)
            refusals[key] = broken.words(f"{key}.") if is_ours else f"{key}.{broken}"
        elif detail["type"] == "unexpected_keyword_argument":
            known = [field.name for field in dataclasses.fields(cls)]
            refusals[where] = unknown_key(name, known, f"{key}.", node)
        elif detail["type"] == "missing":
            refusals[where] = f"{where} is missing from the configuration"
        elif not inside[name]:
            if len(detail["loc"]) > 1 and all(isinstance(part, int) for part in detail["loc"][1:]):
                value = detail["input"]  # the item of a list
            refusals.setdefault(where, refusal(where, value, allowed(hints[name], value)))
    for found in inside.values():
        refusals |= found
    return None


def check_value(key: str, found: Any, kind: Any) -> None:
    """Raise ConfigError naming `key` unless `found` is of the type `kind`, bounds included."""
    try:
        TypeAdapter(kind, config=STRICT).validate_python(found)
        return
    except PydanticError:
        pass
    raise ConfigError(refusal(key, found, allowed(kind, found)))


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
        raise RuleError(lambda section: refusal(f"{section}{field}", found, allowed))


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
    kind, notes = _parts(hint)
    texts = [note.description for note in notes if isinstance(note, FieldInfo)]
    if words := [text for text in texts if text]:
        return words[-1]
    if get_origin(kind) in (Union, UnionType):
        *_, member = (member for member in get_args(kind) if member is not NoneType)
        of_member = allowed(Annotated[member, *notes] if notes else member, found)
        return f"{of_member}, or null" if NoneType in get_args(kind) else of_member
    if get_origin(kind) is Literal:
        return ", ".join("null" if value is None else str(value) for value in get_args(kind))
    if kind is bool:
        return "true, false"
    if dataclasses.is_dataclass(kind):
        return "a mapping of keys to values"
    if kind not in (int, float):
        return str(getattr(kind, "__name__", kind))
    bounds = [b for n in notes for b in (n.metadata if isinstance(n, FieldInfo) else [n])]
    limits = {sign: getattr(b, name) for b in bounds for name, sign in _SIGNS.items()
              if hasattr(b, name)}  # fmt: skip
    named = [
        f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}"
        for sign, limit in limits.items()
        if kind is float
        or limit not in (MOST, LARGEST)
        or (isinstance(found, int) and found > limit)
    ]
    return " and ".join(["a whole number" if kind is int else "a number", *named])


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type inside `Annotated`, and its notes."""
    if get_origin(hint) is not Annotated:
        return hint, ()
    kind, *notes = get_args(hint)
    return kind, tuple(notes)
