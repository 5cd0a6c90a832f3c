"""Records parsed from the rows of a file: a demonstration, a preference or a prompt."""

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
    """A prompt with two different responses, of which people preferred `chosen`."""

    prompt: Messages
    chosen: str
    rejected: str
    margin: float | None = None
    """Strength of the preference, a number >= 0; None if the row does not give one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to respond to."""

    prompt: Messages
    columns: dict[str, Any]
    """Other columns of the row, unchanged, with "prompt" as the prompt's text and "messages" as its
    turns, {"role", "content"} each."""


def prompt_row(messages: Messages) -> dict[str, Any]:
    """Return a prompt as rewards and judges read it: as text, and as its turns."""
    turns = [asdict(message) for message in messages]
    return {"prompt": prompt_text(messages), "messages": turns}


def prompt_text(messages: Messages) -> str:
    """Return a single user message unchanged; a longer dialogue with the role before each turn."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{turn.role.capitalize()}: {turn.content}" for turn in messages)
