"""Format of the requests to a reward server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, with_config
from typing_extensions import TypedDict

from lightning_rlhf.core.wording import counted
from lightning_rlhf.rewards.quote import quoted

MAX_RESPONSES = 16_384
"""Maximum number of responses in a request."""
MAX_TURNS = 1_024
"""Maximum number of messages in a prompt."""


@with_config(ConfigDict(extra="forbid"))
class Turn(TypedDict):
    """One message of a prompt."""

    role: str
    content: str


Messages = list[Turn]
Columns = Mapping[str, list[Any]]
Score = Callable[[list[Messages], list[str], Columns], Sequence[float]]
"""Function from (prompts, responses, columns) to one number for each response."""
Prompt = Annotated[Messages, Field(min_length=1, max_length=MAX_TURNS), FailFast()]


class Request(BaseModel):
    """Body of POST /score: the prompt, the text and the columns of every response."""

    model_config = ConfigDict(extra="forbid")
    prompts: Annotated[list[Prompt], Field(max_length=MAX_RESPONSES), FailFast()]
    responses: Annotated[list[str], Field(max_length=MAX_RESPONSES), FailFast()]
    columns: dict[str, list[Any]] = {}


def read_request(body: bytes | bytearray) -> Request:
    """Return the request that a body of JSON holds.

    Raises ValueError, with a message of one line, if it holds none.
    """
    try:
        request = Request.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = "".join(map(_step, first["loc"])).lstrip(".")
        raise ValueError(f"{place or 'the request'}: {first['msg']}") from None
    count = len(request.responses)
    if len(request.prompts) != count:
        raise ValueError(
            f"found {counted(len(request.prompts), 'prompt')} for {counted(count, 'response')}"
        )
    for name, values in request.columns.items():
        if len(values) != count:
            raise ValueError(
                f"columns[{quoted(name)}] has {counted(len(values), 'value')} for "
                f"{counted(count, 'response')}"
            )
    return request


def _step(part: int | str) -> str:
    is_name = isinstance(part, str) and part.isidentifier() and len(part) < 100
    return f".{part}" if is_name else f"[{quoted(part)}]"
