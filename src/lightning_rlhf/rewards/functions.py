"""Reward that a Python function computes from the texts, and functions for it.

reward.path=lightning_rlhf.rewards.functions:NAME takes prompts and responses, B texts each, and
returns B numbers, or parts of them (`weighted.Parts`). A parameter after the `*` is an argument
(reward.arguments), one before it a column of the data. Words are separated by white space; a
character is a Unicode code point.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field

from lightning_rlhf.core.errors import ConfigError, RewardError, quoted, require
from lightning_rlhf.core.records import DecodedResponses
from lightning_rlhf.core.validation import NonNegativeInt, PositiveInt, Texts, build, check_value
from lightning_rlhf.io.user_code import FAULTS, place_of

Unit = Literal["words", "characters"]


def length_band(
    prompts: Sequence[str],
    responses: Sequence[str],
    *,
    shortest: int,
    longest: int,
    unit: Unit = "words",
) -> list[float]:
    """Return 1 for a response of shortest to longest words, and less the farther it is from that.

        r = max(0, min(1, n / shortest, 2 - n / longest))          n words

    0 for an empty response (shortest 0: 1) and from 2 * longest on; in [0, 1], linear in between.
    With unit="characters", n counts characters.
    """
    check_value("shortest", shortest, NonNegativeInt)
    check_value("longest", longest, Annotated[int, Field(ge=max(1, shortest))])
    check_value("unit", unit, Unit)
    lengths = [len(r.split()) if unit == "words" else len(r) for r in responses]
    return [max(0.0, min(1.0, n / shortest if shortest else 1.0, 2 - n / longest)) for n in lengths]


def regular_expression(
    prompts: Sequence[str], responses: Sequence[str], *, pattern: str, fullmatch: bool = False
) -> list[float]:
    """Return 1 for a response in which the pattern is found, else 0.

    pattern: regular expression of Python's `re`; fullmatch: whether it must match the whole.
    """
    check_value("fullmatch", fullmatch, bool)
    compiled = _compiled("pattern", pattern)
    find = compiled.fullmatch if fullmatch else compiled.search
    return [float(find(response) is not None) for response in responses]


def exact_match(
    prompts: Sequence[str],
    responses: Sequence[str],
    answer: Sequence[Any],
    *,
    extract: str | None = None,
    ignore_case: bool = False,
    strip: bool = True,
) -> list[float | None]:
    """Return 1 for a response that equals the column `answer`, else 0; None for a row without one.

    An answer that is not text is compared as `str` writes it.

    Args:
        answer: column with the right answers.
        extract: pattern whose group 1, at its first match, is compared instead of the whole
            response; a response without a match gets 0.
        ignore_case: whether upper and lower case are equal.
        strip: whether white space around response and answer is ignored.
    """
    check_value("ignore_case", ignore_case, bool)
    check_value("strip", strip, bool)
    compiled = None if extract is None else _compiled("extract", extract)
    if compiled is not None:
        require(compiled.groups > 0, "extract", extract, "a pattern with a group, as in 'is (.*)'")

    def plain(text: str) -> str:
        stripped = text.strip() if strip else text
        return stripped.casefold() if ignore_case else stripped

    def score(response: str, wanted: Any) -> float | None:
        if wanted is None:
            return None
        match = compiled and compiled.search(response)
        found = match.group(1) if match else None if compiled else response
        return float(found is not None and plain(found) == plain(str(wanted)))

    return [score(*pair) for pair in zip(responses, answer, strict=True)]


def repetition(prompts: Sequence[str], responses: Sequence[str], *, n: int = 3) -> list[float]:
    """Return minus the share of a response's word n-grams that occurred earlier in it.

        r = distinct / all - 1          0 where there are fewer than n words

    In (-1, 0]: 0 if nothing is repeated.
    """
    check_value("n", n, PositiveInt)

    def score(response: str) -> float:
        words = response.split()
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0

    return [score(response) for response in responses]


def json_validity(
    prompts: Sequence[str], responses: Sequence[str], *, keys: Sequence[str] = ()
) -> list[float]:
    """Return 1 for a response that is one JSON value, else 0; white space around it is allowed.

    keys: names that the value, then an object, must have.
    Departs: from Python's `json`, which accepts NaN and Infinity; RFC 8259 has neither.
    """
    check_value("keys", keys, Texts)

    def score(response: str) -> float:
        try:
            value = json.loads(response, parse_constant=int)  # which refuses the text "NaN"
        except (ValueError, RecursionError):
            return 0.0
        return float(not keys or (isinstance(value, dict) and all(key in value for key in keys)))

    return [score(response) for response in responses]


def _compiled(argument: str, pattern: str) -> re.Pattern[str]:
    require(isinstance(pattern, str), argument, pattern, "a regular expression")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{argument} is {pattern!r}, no regular expression: {error}") from error


@dataclass(frozen=True)
class FunctionReward:
    """Reward of `function(prompts, responses, **columns, **arguments)`, a number per response.

    `prompts` and `responses` are lists of B texts. A column of the data's rows, "messages"
    included, is a list of B values, None where a row lacks it; the function receives the columns
    that its signature accepts by name.
    """

    function: Callable[..., Any]
    """Function that returns B numbers, as a list, a tuple, a tensor or an array, or for a response
    its `Parts`. It is given all responses to a prompt in one call, as neighbours."""
    arguments: Mapping[str, Any]
    """Arguments of every call; an argument takes precedence over a column of the same name."""
    name: str
    """Key of the reward in the configuration, which errors name."""
    columns: Collection[str] = ()
    """Columns of the data, besides those that the rows of a batch have."""

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: Any, name: str) -> FunctionReward:
        """Return the reward of a function, or of a class that is made of the arguments once.

        Raises ConfigError where the class does not take them.
        """
        if not isinstance(function, type):
            return cls(function, arguments, name)
        try:
            return cls(build(function, arguments, f"{name}.arguments"), {}, name)
        except FAULTS as error:
            raise ConfigError(f"{name}: the class {function.__qualname__}: {error}") from error

    def for_columns(self, columns: Collection[str]) -> FunctionReward:
        """Return the same reward for data in which all or some rows have these columns.

        Raises ConfigError where the function does not take prompts and responses or one of the
        arguments, or requires a parameter that is neither a column nor an argument.
        """
        taken = [name for name in columns if name != "prompt" and self._takes(name)]
        try:
            given = dict.fromkeys([*taken, *self.arguments])
            bound = self._signature.bind("prompts", "responses", **given).arguments
            if bound.get("responses") == "prompts" or bound.get("prompts") == "responses":
                raise TypeError("responses come before prompts")
        except TypeError as error:
            others = [name for name in columns if name not in ("prompt", "messages")]
            parameters = [*self._signature.parameters.values()]
            needed = [p.name for p in parameters[2:] if p.default is p.empty
                      and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]  # fmt: skip
            if lacking := [name for name in needed if name not in given]:
                raise ConfigError(
                    f"{self._called} needs {' and '.join(lacking)}; allowed: a column of the data, "
                    f"which have {', '.join(others) or 'no further ones'}, or a value in "
                    f"{self.name}.arguments ({error})"
                ) from None
            named = ", ".join(p.name for p in parameters if self._takes(p.name))
            named = "any name" if any(p.kind == p.VAR_KEYWORD for p in parameters) else named
            raise ConfigError(
                f"{self._called} takes {self._signature} and cannot be called: {error}; allowed: "
                "(prompts, responses, ...), then parameters that are columns of the data "
                f"({', '.join(others) or 'none'}), messages, the turns of the prompt, or set in "
                f"{self.name}.arguments, which may name {named or 'none'}"
            ) from None
        return replace(self, columns=tuple(taken))

    def __call__(self, decoded: DecodedResponses) -> Any:
        return self.call(self.function, decoded.rows, list(decoded.responses))

    def explain(self, decoded: DecodedResponses) -> Any:
        """Return the explanations by the function's own `explain`, a text or None a response."""
        own = getattr(self.function, "explain", None)
        return None if own is None else self.call(own, decoded.rows, list(decoded.responses))

    def call(
        self, function: Callable[..., Any], rows: Sequence[Any], responses: Sequence[str]
    ) -> Any:
        """Return `function` of the texts, columns and arguments; its faults are an RLHFError."""
        prompts = [row["prompt"] for row in rows]
        columns = self.for_columns(dict.fromkeys([*self.columns, *chain(*rows)])).columns
        given = {name: [row.get(name) for row in rows] for name in columns}
        try:
            return function(prompts, responses, **{**given, **self.arguments})
        except ConfigError as error:
            raise ConfigError(f"{self._called} refuses: {error}") from error
        except RewardError as error:
            raise RewardError(f"{self._called}: {error}") from error
        except FAULTS as error:
            place = place_of(error, self.function)
            raise RewardError(
                f"{self._called} fails{place}: {error!r}; the first of {len(responses)} prompts "
                f"is {quoted(prompts[0])}, its response {quoted(responses[0])}; debug=true shows "
                "the traceback"
            ) from error

    def _takes(self, name: str) -> bool:
        """Return whether the function can be given two texts, and a value by this name."""
        try:
            self._signature.bind_partial((), (), **{name: None})
        except TypeError:
            return False
        return True

    @cached_property
    def _signature(self) -> inspect.Signature:
        try:
            return inspect.signature(self.function)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self._called} has no readable signature: {error}") from error

    @property
    def _called(self) -> str:
        shown = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{self.name}: the function {shown}"
