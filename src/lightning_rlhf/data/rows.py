"""The records that a row of a file becomes: a demonstration, a preference or a prompt."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue."""

    role: Role
    content: str


Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt with the response to imitate."""

    prompt: Messages
    response: str


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt with two different responses; people preferred `chosen`."""

    prompt: Messages
    chosen: str
    rejected: str
    margin: float | None = None
    """By how much it is better, a number >= 0; None where the row does not say that."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to respond to."""

    prompt: Messages
    columns: dict[str, Any]
    """The other columns of the row as they were; "prompt" is the prompt as text, "messages" its
    turns, {"role", "content"} each."""


def prompt_row(messages: Messages) -> dict[str, Any]:
    """A prompt as rewards and judges read it: as text, and its turns."""
    turns = [asdict(message) for message in messages]
    return {"prompt": prompt_text(messages), "messages": turns}


def prompt_text(messages: Messages) -> str:
    """A lone user message as it is; a longer dialogue with the speaker before each turn."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{turn.role.capitalize()}: {turn.content}" for turn in messages)
