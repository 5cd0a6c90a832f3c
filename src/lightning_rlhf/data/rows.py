"""Records parsed from the rows of a file: a demonstration, a preference or a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

Role = Literal["system", "user", "assistant", "tool"]
_FURTHER = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}
"""Keys of a turn besides "role" and "content" that chat templates read, by role."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue."""

    role: Role
    content: str
    further: str = ""
    """JSON object of the further keys that chat templates read: `tool_calls` of an assistant's
    turn, `tool_call_id` and `name` of a tool's; empty if it has none of them."""

    @classmethod
    def of(cls, turn: Mapping[str, Any]) -> Self:
        """Return the message of a mapping with "role", "content" and any further keys."""
        keys = _FURTHER.get(turn["role"], ())
        further = {key: turn[key] for key in keys if turn.get(key)}
        return cls(
            turn["role"],
            turn["content"],
            json.dumps(further, ensure_ascii=False) if further else "",
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the message as chat templates and rewards read it."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        return turn | json.loads(self.further) if self.further else turn

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Return the calls of tools in an assistant's turn."""
        calls: list[dict[str, Any]] = self.as_dict().get("tool_calls", [])
        return calls


Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt with the response to imitate."""

    prompt: Messages
    """Turns before the response; empty for a text that answers nothing."""
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


@dataclass(frozen=True, slots=True)
class Scored:
    """A response with a score, to be compared with others to the same prompt."""

    prompt: Messages
    response: str
    score: float
    is_graded: bool
    """True if a difference of two scores is the strength of a preference."""


def prompt_row(messages: Messages) -> dict[str, Any]:
    """Return a prompt as rewards and judges read it: as text, and as its turns."""
    turns = [message.as_dict() for message in messages]
    return {"prompt": prompt_text(messages), "messages": turns}


def prompt_text(messages: Messages) -> str:
    """Return a single user message unchanged; a longer dialogue with the role before each turn."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{turn.role.capitalize()}: {turn.content}" for turn in messages)
