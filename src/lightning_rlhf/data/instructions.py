"""Rows of well-known data sets of instructions and dialogues: Alpaca, ShareGPT, OpenAI, texts."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.data.fields import text_in, user_turn
from lightning_rlhf.data.native import prompt_of
from lightning_rlhf.data.parsing import (
    BadRow,
    Row,
    checked_text,
    dialogue,
    messages_in,
    split_last,
)
from lightning_rlhf.data.rows import Demonstration, Messages, Prompt

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
    "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip


def _prompt(messages: Messages, row: Row) -> Prompt:
    """Return the turns as a prompt, without the response at their end."""
    return prompt_of(messages[:-1] if messages[-1].role == "assistant" else messages, row)


# Alpaca: {"instruction", "input", "output"}; an empty input is none


def _alpaca_messages(row: Row) -> Messages:
    given = row.get("input")
    if given is not None and not isinstance(given, str):
        raise BadRow("field 'input' is not text", f"found {type(given).__name__}")
    instruction = text_in(row, "instruction")
    if given is None or not given.strip():
        return user_turn(instruction)
    return user_turn(f"{instruction}\n\n{checked_text(given, 'input')}")


def alpaca_demonstration(row: Row) -> Demonstration:
    """Parse {"instruction", "input", "output"}."""
    return Demonstration(_alpaca_messages(row), text_in(row, "output"))


def alpaca_prompt(row: Row) -> Prompt:
    """Parse {"instruction", "input"}."""
    return prompt_of(_alpaca_messages(row), row)


# ShareGPT: {"conversations": [{"from", "value"}, ...]}


def _sharegpt_messages(row: Row) -> Messages:
    """Return the turns without those of the assistant before the first of the user."""
    value = row["conversations"]
    if not isinstance(value, list):
        raise BadRow("field 'conversations' is no list of turns", f"found {type(value).__name__}")
    turns = messages_in([_sharegpt_turn(turn, i) for i, turn in enumerate(value)], "conversations")
    system = turns[:1] if turns[0].role == "system" else ()
    rest = turns[len(system) :]
    first = next((i for i, turn in enumerate(rest) if turn.role == "user"), len(rest))
    return (*system, *rest[first:])


def _sharegpt_turn(turn: Any, i: int) -> Any:
    if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
        return turn  # {"role", "content"}, or an error of `messages_in`
    name = turn["from"]
    role = _SHAREGPT_ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise BadRow(
            "unknown role in 'conversations'",
            f"found {name!r} in conversations[{i}].from; known are {', '.join(_SHAREGPT_ROLES)}",
        )
    return {"role": role, "content": turn["value"]}


def sharegpt_demonstration(row: Row) -> Demonstration:
    """Parse a dialogue up to the last turn of the assistant."""
    turns = list(_sharegpt_messages(row))
    while turns and turns[-1].role != "assistant":
        turns.pop()
    if not turns:
        raise BadRow("no turn of the assistant answers one of the user")
    return Demonstration(*split_last(tuple(turns), "conversations"))


def sharegpt_prompt(row: Row) -> Prompt:
    """Parse a dialogue without the response at its end."""
    turns = _sharegpt_messages(row)
    if not turns:
        raise BadRow("the prompt does not end with a user turn")
    return _prompt(turns, row)


# OpenAI: {"messages": [{"role", "content"}, ...]}


def messages_demonstration(row: Row) -> Demonstration:
    """Parse {"messages"}, whose last turn is the response."""
    return Demonstration(*split_last(messages_in(row["messages"], "messages"), "messages"))


def messages_prompt(row: Row) -> Prompt:
    """Parse {"messages"} without the response at its end."""
    return _prompt(messages_in(row["messages"], "messages"), row)


# {"prompt", "completion"}


def completion_demonstration(row: Row) -> Demonstration:
    """Parse {"prompt", "completion"}, each a text or a list of messages."""
    return Demonstration(*split_last(dialogue(row, "completion"), "completion"))


# {"text"}


def text_demonstration(row: Row) -> Demonstration:
    """Parse {"text"} as a text without a prompt, whose every token is learned."""
    return Demonstration((), text_in(row, "text"))


def text_prompt(row: Row) -> Prompt:
    """Parse {"text"} as what the user asks."""
    return prompt_of(user_turn(text_in(row, "text")), row)
