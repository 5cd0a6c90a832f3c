"""Decoding of rows, and of the texts and dialogues in their fields.

A null field counts as absent, since Parquet fills absent columns with null. Text that starts with
"\\n\\nHuman:" is a dialogue in the HH format, which marks the turns inside the text:
https://huggingface.co/datasets/Anthropic/hh-rlhf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, get_args

from lightning_rlhf.data.rows import Message, Messages, Role

Row = Mapping[str, Any]
NumberedRows = Iterator[tuple[int, "bytes | Row | BadRow"]]
"""Rows of a source with their numbers, from 1, not decoded yet where they are lines of JSON."""

_HH_START = "\n\nHuman:"
_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_HH_ROLES: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}

IDENTICAL = "chosen and rejected are identical"
"""Reason for leaving out a pair whose two responses are the same."""
MAX_LINE_BYTES = 16 * 2**20
"""Maximum length of a line of JSON in bytes, line ending included."""
MAX_CHARACTERS = 1_000_000
"""Maximum length of one text (a message, a prompt or a response) in characters."""
UNREAD = object()
"""Value of a column that is present but not read."""


class BadRow(Exception):
    """Raised for a row that cannot be used."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        """Reason without the row's own content, so that rows can be counted by it."""


class UnusedRow(BadRow):
    """Raised for a sound row that holds nothing for the stage: it is always left out."""


ONE_A_LINE = "allowed: one JSON object a line"


def decode_row(raw: bytes | Row | BadRow) -> Row:
    """Return the row in one line of JSON; return a row that is already decoded unchanged.

    Raises:
        BadRow: the line is too long, not UTF-8, not JSON, or not a JSON object; or `raw` itself.
    """
    if isinstance(raw, BadRow):
        raise raw
    if not isinstance(raw, bytes):
        return raw
    if len(raw) > MAX_LINE_BYTES:
        raise BadRow("the line is too long", f"more than {MAX_LINE_BYTES:,} bytes; {ONE_A_LINE}")
    try:
        row = json.loads(raw.decode("utf-8").rstrip("\r\n"), object_pairs_hook=once_each)
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", f"at byte {error.start + 1} of the line") from error
    except json.JSONDecodeError as error:
        where = f"{error.msg.removesuffix(' at')}, column {error.colno}"
        is_spread = raw.strip() == b"{" or raw.lstrip().startswith(b"[")
        raise BadRow("broken JSON", ONE_A_LINE if is_spread else where) from error
    except (ValueError, RecursionError) as error:  # too many digits or levels
        raise BadRow("broken JSON", str(error)) from error
    if not isinstance(row, dict):
        raise BadRow("not a JSON object", f"found {type(row).__name__}; {ONE_A_LINE}")
    return row


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object made of `pairs`.

    Raises BadRow if a name occurs twice, since JSON does not define which value counts.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow("a field stands twice in one object", f"found {twice!r}")
    return found


def has(row: Row, field: str) -> bool:
    """Return whether the row has a value in the field."""
    return row.get(field) is not None


def missing(field: str, row: Row, needed: str) -> BadRow:
    """Return the error for a field that the row lacks; needed: description of what is allowed."""
    found = ", ".join(repr(name) for name in row if has(row, name)) or "none"
    return BadRow(f"field {field!r} is missing", f"found {found[:200]}; {needed}")


def dialogue(row: Row, field: str) -> Messages:
    """Return the turns in `field`, after the row's prompt if it has one."""
    value = row[field]
    prompt = prompt_messages(row) if has(row, "prompt") else ()
    if isinstance(value, str) and not value.startswith(_HH_START):
        if not prompt:
            raise missing("prompt", row, f"{field!r} is a text, which answers one")
        return (*prompt, Message("assistant", checked_text(value, field)))
    turns = messages_in(value, field)
    return turns if turns[: len(prompt)] == prompt else (*prompt, *turns)


def split_last(dialogue: Messages, field: str) -> tuple[Messages, str]:
    """Return the turns before the last, and the text of the last, which must be the assistant's."""
    *turns, last = dialogue
    if last.role != "assistant":
        raise BadRow(f"the last turn of '{field}' is not the assistant's", f"found {last.role}")
    prompt = tuple(turns)
    check_prompt(prompt)
    return prompt, last.content


def check_prompt(prompt: Messages) -> None:
    """Raise BadRow unless the turns can be responded to."""
    if not prompt or prompt[-1].role not in ("user", "tool"):
        raise BadRow("the prompt does not end with a user turn")
    if any(turn.role == "system" for turn in prompt[1:]):
        raise BadRow("a system turn stands after the first turn")


def prompt_messages(row: Row) -> Messages:
    """Return the turns of the field "prompt"; a text is one user turn."""
    value = row["prompt"]
    if isinstance(value, str) and value.startswith(_HH_START):
        # Some copies of the HH data end the prompt with the marker of the next turn.
        value = value.rstrip().removesuffix("\n\nAssistant:")
    elif isinstance(value, str):
        return (Message("user", checked_text(value, "prompt")),)
    return messages_in(value, "prompt")


def messages_in(value: Any, field: str) -> Messages:
    """Return the turns of a list of messages, or of a text in the HH format."""
    if isinstance(value, str):
        return _hh_messages(value, field)
    if not isinstance(value, list):
        raise BadRow(f"field '{field}' is neither text nor a list of messages",
                     f"found {type(value).__name__}")  # fmt: skip
    if not value:
        raise BadRow(f"field '{field}' is empty or blank")
    return tuple(
        _message(turn, field, f"{field}[{i}]", is_last=i == len(value) - 1)
        for i, turn in enumerate(value)
    )


def _message(turn: Any, field: str, place: str, *, is_last: bool) -> Message:
    """Return a turn; only before the last may calls of tools stand for the text."""
    calls = None
    if isinstance(turn, dict) and turn.get("role") == "assistant" and turn.get("tool_calls"):
        calls = _tool_calls(turn["tool_calls"], field, f"{place}.tool_calls")
        turn = {"content": None, **turn, "tool_calls": calls}
    if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
        names = ", ".join(map(repr, turn)) or "nothing" if isinstance(turn, dict) else ""
        found = f"has {names[:200]}" if names else f"is {type(turn).__name__}"
        raise BadRow(f'a turn of \'{field}\' is not {{"role", "content"}}', f"{place} {found}")
    role, content = turn["role"], turn["content"]
    if role not in get_args(Role):
        raise BadRow(f"unknown role in '{field}'",
                     f"found {role!r} in {place}.role; known are system, user, assistant, tool"
                     )  # fmt: skip
    if calls and not content and not is_last:
        return _with_further(turn | {"content": ""}, field, place)
    if not isinstance(content, str):
        found = f"{place}.content is {type(content).__name__}"
        if isinstance(content, list):
            found = f"{place}.content is a list of parts; allowed: one text"
        elif calls:
            found += f", and {place}.tool_calls stands for it; a response is a text"
        raise BadRow(f"field '{field}' is not text", found)
    checked_text(content, field, f"{place}.content")
    return _with_further(turn, field, place)


def _with_further(turn: dict[str, Any], field: str, place: str) -> Message:
    try:
        message = Message.of(turn)
    except (TypeError, ValueError) as error:
        raise BadRow(f"a turn of '{field}' is not JSON", f"{place}: {error}") from error
    if message.further:
        checked_text(message.further, field, place)
    return message


def _tool_calls(value: Any, field: str, place: str) -> list[dict[str, Any]]:
    """Return calls of tools with their arguments as objects, as chat templates read them."""
    calls: list[dict[str, Any]] = []
    for i, call in enumerate(value if isinstance(value, list) else [value]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(
                f"a call of a tool in '{field}' has no name",
                f'{place}[{i}] is not {{"function": {{"name", "arguments"}}}}',
            )
        if isinstance(function.get("arguments"), str):
            with suppress(ValueError, RecursionError):  # text that is no JSON stays as it is
                function = function | {"arguments": json.loads(function["arguments"])}
        calls.append(call | {"function": function})
    return calls


def _hh_messages(text: str, field: str) -> Messages:
    if not text.startswith(_HH_START):
        raise BadRow(f"field '{field}' is text but not a dialogue")
    _, *pieces = _HH_TURN.split(text)
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    return tuple(
        Message(_HH_ROLES[speaker], checked_text(content, field, f"turn {number}").strip())
        for number, (speaker, content) in enumerate(turns, start=1)
    )


def checked_text(text: str, field: str, place: str = "") -> str:
    """Return the text if it can be used; raise BadRow otherwise.

    place: position of the text within the field, if the field holds more than one text.
    """
    if not text.strip():
        raise BadRow(f"field '{field}' is empty or blank", place)
    if len(text) > MAX_CHARACTERS:
        raise BadRow(f"field '{field}' is too long", ", ".join(filter(None, [
            place, f"{len(text):,} characters; allowed: {MAX_CHARACTERS:,}"])))  # fmt: skip
    if "\x00" in text:
        raise BadRow(f"field '{field}' holds a null byte", place)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise BadRow(
            f"field '{field}' holds half a surrogate pair, which UTF-8 cannot express", place
        )
    return text
