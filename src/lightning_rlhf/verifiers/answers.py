"""Verifiers of an answer in a response: a number, a formula, JSON, a puzzle of reasoning-gym.

They take prompts and responses, B texts each, and return B numbers from 0 to 1. A parameter after
the `*` is an argument (reward.arguments), one before it a column of the data.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from lightning_rlhf.core.errors import ConfigError, first_line, quoted, require
from lightning_rlhf.core.validation import NonNegativeFloat, PositiveInt, check_value
from lightning_rlhf.io.user_code import optional

Take = Literal["auto", "boxed", "last"]
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
LATEX = r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}"
NUMBER = re.compile(
    rf"(?<!\w)(?<!\w\.)(?:(?<![)\]}}])([-+−]))?\$?(?:{LATEX}|({DIGITS})(?:[eE]([-+]?[0-9]+))?"
    r"(?:/([0-9]+)(?!\.?[0-9]))?)(\s?\\?%)?"
)
"""A number: sign, then \\frac{a}{b}, or digits, exponent and denominator, then percent."""
BESIDE = re.compile(r"\\(?:text|mathrm)\{[^{}]*\}|\\[,;! ]|\$")
"""Text that may stand in a box beside its number: units, thin spaces and dollars."""
LARGEST_EXPONENT = 400
"""Exponents beyond are no numbers: a response must not make this process compute 10^(10^9)."""
Texts = Sequence[str]


def numeric_answer(
    prompts: Texts,
    responses: Texts,
    answer: Sequence[Any],
    *,
    take: Take = "auto",
    absolute: float = 0.0,
    relative: float = 0.0,
    percent: bool = True,
) -> list[float | None]:
    """Return 1 for a response whose number x is the answer a, else 0; None for a row without one.

        |x - a| <= max(absolute, relative * |a|)          in fractions, so without rounding

    Args:
        answer: column with the right answers, numbers or texts; read as responses are.
        take: last: the last number of the text | boxed: what the last \\boxed{} holds |
            auto: boxed where there is a box, else last.
        absolute: largest difference; 0 allows none.
        relative: largest difference as a share of the answer; 0 allows none, 1 almost anything.
        percent: whether 50% is 1/2; false reads it as 50.

    Raises ConfigError for an answer that has no number.
    """
    check_value("take", take, Take)
    check_value("absolute", absolute, NonNegativeFloat)
    check_value("relative", relative, NonNegativeFloat)
    check_value("percent", percent, bool)

    def is_right(response: str, wanted: Any) -> bool:
        right = number_in(str(wanted), "auto", percent=percent)
        if right is None:
            raise ConfigError(f"answer is {wanted!r}; allowed: a number, or a text with one")
        found = number_in(response, take, percent=percent)
        close = max(Fraction(absolute), Fraction(relative) * abs(right))
        return found is not None and abs(found - right) <= close

    return each(is_right, responses, answer)


def number_in(text: str, take: Take, *, percent: bool) -> Fraction | None:
    """Return the number that a text gives as its answer; None without one.

    docs/verifiers.md says what is a number; arguments as `numeric_answer` has them.
    """
    box = last_box(text) if take != "last" else None
    if box is not None:
        match = NUMBER.fullmatch(BESIDE.sub("", box).strip().rstrip("."))
    else:
        last = deque(NUMBER.finditer(text if take != "boxed" else ""), maxlen=1)
        match = last.pop() if last else None
    if match is None:
        return None
    sign, above, below, digits, exponent, denominator, is_share = match.groups()
    try:
        if abs(int(exponent or 0)) > LARGEST_EXPONENT:
            return None
        plain = (digits or above).replace(",", "") + (f"e{exponent}" if exponent else "")
        value = Fraction(plain) / int(denominator or below or 1)
    except (ValueError, ZeroDivisionError):  # thousands of digits, or a division by 0
        return None
    value = value / 100 if is_share and percent else value
    return -value if sign in ("-", "−") else value


def last_box(text: str) -> str | None:
    """Return what the last \\boxed{...} of a text holds, braces inside paired; None without one."""
    _, mark, rest = text.rpartition(r"\boxed{")
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:place]
    return rest if mark else None


def math_answer(
    prompts: Texts, responses: Texts, answer: Sequence[Any], *, timeout_s: int = 5
) -> list[float | None]:
    """Return 1 for a response that is equal to the answer by Math-Verify, else 0; None without one.

    Args:
        answer: column with the right answers: LaTeX, with or without $, or an expression.
        timeout_s: longest time to read a text, and to compare two, seconds; then 0.

    Source: https://github.com/huggingface/Math-Verify
    Raises ConfigError for an answer in which Math-Verify finds nothing.
    """
    check_value("timeout_s", timeout_s, PositiveInt)
    library = optional("math_verify", "verify", "math_answer")

    def is_right(response: str, wanted: Any) -> Any:
        text = str(wanted) if re.search(r"\$|\\boxed", str(wanted)) else f"${wanted}$"
        right = library.parse(text, parsing_timeout=timeout_s)
        require(bool(right), "answer", wanted, "a formula that Math-Verify reads")
        found = library.parse(response, parsing_timeout=timeout_s)
        return library.verify(right, found, timeout_seconds=timeout_s)

    return each(is_right, responses, answer)


def json_schema(prompts: Texts, responses: Texts, schema: Any) -> list[float | None]:
    """Return 1 for a response that is one JSON value valid by a schema, else 0.

    White space around it is allowed; NaN and Infinity are not JSON. The draft is what `$schema`
    names, else 2020-12. References to other documents are not followed.

    schema: column of schemas, or one for all responses as an argument; a mapping or JSON.
    """
    jsonschema = optional("jsonschema", "verify", "json_schema")
    referencing = optional("referencing", "verify", "json_schema")
    is_column, known = isinstance(schema, list | tuple), dict[str, Any]()
    for one in schema if is_column else [schema]:
        try:
            value = json.loads(key := one if isinstance(one, str) else json.dumps(one))
            kind = jsonschema.validators.validator_for(value, jsonschema.Draft202012Validator)
            kind.check_schema(value)
        except (ValueError, RecursionError, jsonschema.SchemaError) as error:
            fault = f"no JSON schema: {first_line(error)}"
            raise ConfigError(f"schema is {quoted(one)}, {fault}") from None
        known.setdefault(key, kind(value, registry=referencing.Registry()))

    def is_valid(response: str, one: Any) -> Any:
        validator = known[one if isinstance(one, str) else json.dumps(one)]
        try:  # parse_constant refuses the text "NaN"
            return validator.is_valid(json.loads(response, parse_constant=int))
        except (ValueError, RecursionError):
            return False

    return each(is_valid, responses, schema if is_column else [schema] * len(responses))


def reasoning_gym(
    prompts: Texts, responses: Texts, answer: Any, metadata: Any, *, tag: str | None = "answer"
) -> list[float | None]:
    """Return the score, 0 to 1, that a task of reasoning-gym gives the response by its own check.

    Args:
        answer, metadata: columns that `reasoning_gym.create_dataset` makes; metadata is a mapping
            or JSON, and its source_dataset names the task.
        tag: name of the tag whose last <tag>...</tag> is checked, 0 without one; None checks the
            whole response.

    Source: https://github.com/open-thought/reasoning-gym
    Departs: a response on which the check of a task fails, as some do on texts that are no number,
    scores 0. A check that fails on the right answer too raises its error.
    """
    library = optional("reasoning_gym", "reasoning-gym", "reasoning_gym")
    check_value("tag", tag, str | None)
    inside = re.compile(rf"<{re.escape(tag or '')}>(.*?)</", re.DOTALL)

    def score(response: str, row: tuple[str, Any, Any]) -> float:
        prompt, right, facts = row
        facts = json.loads(facts) if isinstance(facts, str) else facts
        is_task = isinstance(facts, Mapping) and "source_dataset" in facts
        require(is_task, "metadata", facts, "a mapping with source_dataset")
        if facts["source_dataset"] in ("arc_agi", "rearc"):  # whose checks compare tuples
            facts = {**facts, "output": tuple(map(tuple, facts["output"]))}
        entry = {"question": prompt, "answer": right, "metadata": facts}
        check = library.get_score_answer_fn(facts["source_dataset"])
        found = inside.findall(response) if tag else [response]
        try:
            return float(check(answer=found[-1].strip(), entry=entry)) if found else 0.0
        except Exception:
            check(answer=right, entry=entry)
            return 0.0

    return each(score, responses, [*zip(prompts, answer, metadata, strict=True)])


def each(
    check: Callable[[str, Any], Any], responses: Texts, answers: Sequence[Any], mapped: Any = map
) -> list[float | None]:
    """Return what the check of each response and answer gives; None for a row without one."""

    def checked(text: str, right: Any) -> float | None:
        return None if right is None else float(check(text, right))

    return [*mapped(checked, responses, answers)]
