"""What a reward server is asked, and how it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from lightning_rlhf.rewards.quote import quoted

Messages = list[dict[str, str]]
"""The turns of a prompt, {"role", "content"} each."""
Columns = Mapping[str, list[Any]]


class Refused(Exception):
    """A request that gets no scores."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def read_request(body: bytes) -> tuple[list[Messages], list[str], Columns]:
    """Prompts, responses and columns of a request; `Refused` says what is wrong with it."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the request is no JSON: {error}") from None
    if not isinstance(request, dict):
        raise _bad(f"the request is {quoted(request)}, no JSON object")
    for key in request:
        if key not in ("prompts", "responses", "columns"):
            raise _bad(f"{key!r} is no known key; allowed: prompts, responses, columns")
    for key in ("prompts", "responses"):
        if key not in request:
            raise _bad(f"the request has no {key!r}")
        if not isinstance(request[key], list):
            raise _bad(f"{key!r} is {quoted(request[key])}, no list")
    prompts, responses = request["prompts"], request["responses"]
    if len(prompts) != len(responses):
        raise _bad(f"there are {len(prompts)} prompts for {len(responses)} responses")
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not (isinstance(prompt, list) and prompt and all(map(_is_message, prompt))):
            raise _bad(
                f"prompts[{i}] is {quoted(prompt)}; allowed: a list of "
                '{"role": text, "content": text}'
            )
        if not isinstance(response, str):
            raise _bad(f"responses[{i}] is {quoted(response)}, no text")
    columns = {"columns": {}, **request}["columns"]
    if not isinstance(columns, dict):
        raise _bad(f"'columns' is {quoted(columns)}, no JSON object")
    for name, values in columns.items():
        if not isinstance(values, list) or len(values) != len(responses):
            raise _bad(
                f"columns[{name!r}] is {quoted(values)}; allowed: a list of {len(responses)} values"
            )
    return prompts, responses, columns


def _is_message(turn: Any) -> bool:
    is_turn = isinstance(turn, dict) and turn.keys() == {"role", "content"}
    return is_turn and all(isinstance(text, str) for text in turn.values())


def _bad(reason: str) -> Refused:
    return Refused(HTTPStatus.BAD_REQUEST, reason)
