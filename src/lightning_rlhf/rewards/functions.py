"""Rewards that need no model: reward.path=lightning_rlhf.rewards.functions:NAME.

Each function takes prompts and responses, B texts each, and returns B numbers. A parameter after
the `*` is an argument (reward.arguments), one before it a column of the data. Words are separated
by white space; a character is a Unicode code point.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from lightning_rlhf.core.errors import ConfigError, require
from lightning_rlhf.core.validation import NonNegativeInt, PositiveInt, check_value

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

    Args:
        pattern: regular expression of Python's `re`.
        fullmatch: whether the pattern must match the whole response.
    """
    compiled = _compiled("pattern", pattern)
    check_value("fullmatch", fullmatch, bool)
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
    compiled = None if extract is None else _compiled("extract", extract)
    if compiled is not None:
        require(compiled.groups > 0, "extract", extract, "a pattern with a group, as in 'is (.*)'")
    check_value("ignore_case", ignore_case, bool)
    check_value("strip", strip, bool)

    def plain(text: str) -> str:
        stripped = text.strip() if strip else text
        return stripped.casefold() if ignore_case else stripped

    def score(response: str, wanted: Any) -> float | None:
        if wanted is None:
            return None
        found = response if compiled is None else _group(compiled, response)
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

    Departs: from Python's `json`, which accepts NaN and Infinity; RFC 8259 has neither.

    Args:
        keys: names that the value, then an object, must have.
    """
    is_list = isinstance(keys, Sequence) and not isinstance(keys, str)
    require(is_list and all(isinstance(key, str) for key in keys), "keys", keys, "a list of names")

    def score(response: str) -> float:
        try:
            value = json.loads(response, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return 0.0
        return float(not keys or (isinstance(value, dict) and all(key in value for key in keys)))

    return [score(response) for response in responses]


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _group(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return None if found is None else found.group(1)


def _compiled(argument: str, pattern: str) -> re.Pattern[str]:
    require(isinstance(pattern, str), argument, pattern, "a regular expression")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{argument} is {pattern!r}, no regular expression: {error}") from error
