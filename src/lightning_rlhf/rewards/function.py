"""Reward that a Python function computes from the texts."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_rlhf.core.errors import ConfigError, RewardError
from lightning_rlhf.core.types import DecodedResponses
from lightning_rlhf.core.wording import quoted
from lightning_rlhf.io.user_code import FAULTS, number


@dataclass(frozen=True)
class FunctionReward:
    """Reward of `function(prompts, responses, **columns, **arguments)`, one number per response.

    `prompts` and `responses` are lists of B texts. A column of the data's rows, "messages"
    included, is a list of B values, None where a row lacks it; the function receives the columns
    that its signature accepts, by name or with **kwargs.

    Raises:
        ConfigError: the function's signature does not accept the texts or the arguments.
    """

    function: Callable[..., Any]
    """Function that returns B numbers: a list, a tuple, a tensor or an array."""
    arguments: Mapping[str, Any]
    """Arguments of every call; an argument takes precedence over a column of the same name."""
    name: str
    """Key of the reward in the configuration, which errors name."""
    columns: Collection[str] = ()
    """Columns of the data, besides those that the rows of a batch have."""

    def __post_init__(self) -> None:
        takes = self._takes
        if not takes.texts:
            raise ConfigError(
                f"{self._called} takes {takes.signature}; allowed: (prompts, responses, ...)"
            )
        for argument in self.arguments:
            if not takes.is_taken(argument):
                raise ConfigError(
                    f"{self.name}.arguments has {argument!r}, but {self._called} takes "
                    f"{takes.signature}; allowed: {', '.join(takes.named) or 'none'}"
                )

    def for_columns(self, columns: Collection[str]) -> FunctionReward:
        """Return the same reward for data in which all or some rows have these columns.

        If no row of a batch has one of them, the function receives None for each row of the batch.

        Raises:
            ConfigError: the function requires a parameter that is neither a column nor an argument.
        """
        self._check(columns)
        return replace(self, columns=tuple(columns))

    def __call__(self, decoded: DecodedResponses) -> list[float | None]:
        rows, responses = decoded.rows, list(decoded.responses)
        prompts = [row["prompt"] for row in rows]
        columns = [*dict.fromkeys([*self.columns, *(name for row in rows for name in row)])]
        self._check(columns)
        full = [{**dict.fromkeys(columns), **row} for row in rows]
        given = {
            name: [row[name] for row in full]
            for name in columns
            if name != "prompt" and self._takes.is_taken(name)
        }
        try:
            result = self.function(prompts, responses, **{**given, **self.arguments})
        except ConfigError as error:
            raise ConfigError(f"{self._called} refuses: {error}") from error
        except FAULTS as error:
            raise RewardError(
                f"{self._called} fails{self._place(error)}: {error!r}; the first of "
                f"{len(responses)} prompts is {quoted(prompts[0])}, its response "
                f"{quoted(responses[0])}; debug=true shows the traceback"
            ) from error
        return self._numbers(result, len(responses))

    def _place(self, error: BaseException) -> str:
        """Return " at FILE:LINE" of the last line reached in the function's file, or "" if
        unknown."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if code and frame.filename == code.co_filename]
        return f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""

    def _check(self, columns: Collection[str]) -> None:
        there = [name for name in columns if name != "prompt"]
        for name in self._takes.required:
            if name not in there and name not in self.arguments:
                in_files = [column for column in there if column != "messages"]
                raise ConfigError(
                    f"{self._called} needs {name!r}, which is neither in {self.name}.arguments "
                    f"({', '.join(self.arguments) or 'empty'}) nor a column of the data "
                    f"({', '.join(in_files) or 'none'}) nor messages, the turns of the prompt"
                )

    def _numbers(self, result: Any, count: int) -> list[float | None]:
        scores = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(scores, list | tuple):
            raise RewardError(
                f"{self._called} returned {quoted(result)}; allowed: a list of numbers, one for "
                f"each of {count} responses"
            )
        numbers: list[float | None] = []
        for score in scores:
            try:
                numbers.append(None if score is None else number(score))
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise RewardError(
                    f"{self._called} returned {quoted(score)} as score {len(numbers)} of "
                    f"{len(scores)}, counted from 0; allowed: a number"
                ) from error
        return numbers

    @cached_property
    def _takes(self) -> _Takes:
        try:
            return _Takes(inspect.signature(self.function))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self._called} does not tell what it takes: {error}") from error

    @property
    def _called(self) -> str:
        shown = getattr(self.function, "__qualname__", repr(self.function))
        return f"{self.name}: the function {shown}"


class _Takes:
    """Parameters of a function: two texts by position, all others by name."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        parameters = list(signature.parameters.values())
        first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._first = [p.name for p in first[:2]]
        rest = [p for p in parameters if p.name not in self._first]
        named = [p for p in rest if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.named = [p.name for p in named]
        self.required = [p.name for p in named if p.default is p.empty]
        kinds = {p.kind for p in rest}
        self._takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        room = len(self._first) == 2 or inspect.Parameter.VAR_POSITIONAL in kinds
        swapped = "responses" in self._first[:1] or "prompts" in self._first[1:]
        self.texts = room and not swapped and inspect.Parameter.POSITIONAL_ONLY not in kinds

    def is_taken(self, name: str) -> bool:
        """Return whether a value can be passed by this name."""
        return name in self.named or (self._takes_all and name not in self._first)
