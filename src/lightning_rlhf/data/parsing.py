"""Accepted forms of a row of a file, and their conversion into records.

Every form is first turned into a dialogue, a tuple of messages, and then split before its last
turn. A null field counts as absent, since Parquet fills absent columns with null. Text that starts
with "\\n\\nHuman:" is a dialogue in the HH format, which marks the turns inside the text:
https://huggingface.co/datasets/Anthropic/hh-rlhf.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, get_args

from lightning_rlhf.data.rows import (
    Demonstration,
    Message,
    Messages,
    Preference,
    Prompt,
    Role,
    prompt_row,
)

Row = Mapping[str, Any]

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
DEMONSTRATION_FIELDS = ("prompt", "response", "chosen", "messages")
"""Fields that are read from a row of demonstrations."""
PREFERENCE_FIELDS = ("prompt", "chosen", "rejected", "margin")
"""Fields that are read from a row of preferences; from a row of prompts all are, for the
rewards."""


class BadRow(Exception):
    """Raised for a row that cannot be used."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        """Reason without the row's own content, so that rows can be counted by it."""


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
        row = json.loads(raw.decode("utf-8").rstrip("\r\n"), object_pairs_hook=_once_each)
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


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object made of `pairs`.

    Raises BadRow if a name occurs twice, since JSON does not define which value counts.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow("a field stands twice in one object", f"found {twice!r}")
    return found


def parse_demonstration(row: Row) -> Demonstration:
    """Parse {"prompt", "response"}, {"messages"}, or the chosen side of a preference.

    Raises:
        BadRow: the row cannot be used; states the reason.
    """
    if _has(row, "response"):
        return Demonstration(*_split(_dialogue(row, "response"), "response"))
    if _has(row, "chosen"):
        return Demonstration(*_split(_dialogue(row, "chosen"), "chosen"))
    if _has(row, "messages"):
        return Demonstration(*_split(_messages(row["messages"], "messages"), "messages"))
    raise _missing("response", row, 'a demonstration is {"prompt", "response"}, {"messages"} or '
                   '{"chosen", "rejected"}')  # fmt: skip


def parse_preference(row: Row) -> Preference:
    """Parse {"prompt", "chosen", "rejected"}, or two whole dialogues {"chosen", "rejected"}.

    Raises:
        BadRow: the row cannot be used; states the reason.
    """
    for field in ("chosen", "rejected"):
        if not _has(row, field):
            raise _missing(field, row, 'a preference is {"prompt", "chosen", "rejected"}')
    prompt, chosen = _split(_dialogue(row, "chosen"), "chosen")
    rejected_prompt, rejected = _split(_dialogue(row, "rejected"), "rejected")
    if prompt != rejected_prompt:
        raise BadRow("chosen and rejected differ before the last turn",
                     _difference(prompt, rejected_prompt))  # fmt: skip
    if chosen.strip() == rejected.strip():
        raise BadRow(IDENTICAL)
    return Preference(prompt, chosen, rejected, _margin(row))


def parse_prompt(row: Row) -> Prompt:
    """Parse {"prompt"} or {"messages"}, or the prompt of a demonstration or preference.

    Raises:
        BadRow: the row cannot be used; states the reason.
    """
    if _has(row, "prompt"):
        messages = _prompt_messages(row)
    elif _has(row, "messages"):
        messages = _messages(row["messages"], "messages")
    elif _has(row, "chosen"):
        messages = _split(_dialogue(row, "chosen"), "chosen")[0]
    else:
        raise _missing("prompt", row, 'a prompt is {"prompt"} or {"messages"}')
    if messages[-1].role == "assistant":
        messages = messages[:-1]
    _check_prompt(messages)
    others = {key: value for key, value in row.items() if key not in ("prompt", "messages")}
    return Prompt(messages, others | prompt_row(messages))


def is_answered(row: Row) -> bool:
    """Return whether the row holds more than a prompt; several rows may then share the prompt."""
    return any(_has(row, field) for field in ("response", "chosen", "messages"))


def _difference(chosen: Messages, rejected: Messages) -> str:
    """Return a description of the first turn before the last in which two dialogues differ."""
    if chosen[: len(rejected)] == rejected or rejected[: len(chosen)] == chosen:
        count = len(chosen)
        turns = f"{count} turn{'s' * (count != 1)}"
        return f"{turns} before the last of chosen, {len(rejected)} of rejected"
    pairs = zip(chosen, rejected, strict=False)
    number = next(i for i, (one, other) in enumerate(pairs, start=1) if one != other)
    return f"turn {number} is not the same"


def _margin(row: Row) -> float | None:
    margin = row["margin"] if _has(row, "margin") else None
    if not isinstance(margin, int | float) or isinstance(margin, bool):
        return None
    return float(margin) if math.isfinite(margin) and margin >= 0 else None


def _has(row: Row, field: str) -> bool:
    return row.get(field) is not None


def _missing(field: str, row: Row, needed: str) -> BadRow:
    found = ", ".join(repr(name) for name in row if _has(row, name)) or "none"
    return BadRow(f"field {field!r} is missing", f"found {found[:200]}; {needed}")


def _dialogue(row: Row, field: str) -> Messages:
    """Return the turns in `field`, after the row's prompt if it has one."""
    value = row[field]
    prompt = _prompt_messages(row) if _has(row, "prompt") else ()
    if isinstance(value, str) and not value.startswith(_HH_START):
        if not prompt:
            raise _missing("prompt", row, f"{field!r} is a text, which answers one")
        return (*prompt, Message("assistant", _text(value, field)))
    turns = _messages(value, field)
    return turns if turns[: len(prompt)] == prompt else (*prompt, *turns)


def _split(dialogue: Messages, field: str) -> tuple[Messages, str]:
    """Return the turns before the last, and the text of the last, which must be the assistant's."""
    *turns, last = dialogue
    if last.role != "assistant":
        raise BadRow(f"the last turn of '{field}' is not the assistant's", f"found {last.role}")
    prompt = tuple(turns)
    _check_prompt(prompt)
    return prompt, last.content


def _check_prompt(prompt: Messages) -> None:
    if not prompt or prompt[-1].role != "user":
        raise BadRow("the prompt does not end with a user turn")
    if any(turn.role == "system" for turn in prompt[1:]):
        raise BadRow("a system turn stands after the first turn")


def _prompt_messages(row: Row) -> Messages:
    value = row["prompt"]
    if isinstance(value, str) and value.startswith(_HH_START):
        # Some copies of the HH data end the prompt with the marker of the next turn.
        value = value.rstrip().removesuffix("\n\nAssistant:")
    elif isinstance(value, str):
        return (Message("user", _text(value, "prompt")),)
    return _messages(value, "prompt")


def _messages(value: Any, field: str) -> Messages:
    if isinstance(value, str):
        return _hh_messages(value, field)
    if not isinstance(value, list):
        raise BadRow(f"field '{field}' is neither text nor a list of messages",
                     f"found {type(value).__name__}")  # fmt: skip
    if not value:
        raise BadRow(f"field '{field}' is empty or blank")
    return tuple(_message(turn, field, f"{field}[{i}]") for i, turn in enumerate(value))


def _message(turn: Any, field: str, place: str) -> Message:
    if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
        names = ", ".join(map(repr, turn)) or "nothing" if isinstance(turn, dict) else ""
        found = f"has {names[:200]}" if names else f"is {type(turn).__name__}"
        raise BadRow(f'a turn of \'{field}\' is not {{"role", "content"}}', f"{place} {found}")
    role, content = turn["role"], turn["content"]
    if role not in get_args(Role):
        raise BadRow(f"unknown role in '{field}'",
                     f"found {role!r} in {place}.role; known are system, user, assistant"
                     )  # fmt: skip
    if not isinstance(content, str):
        found = f"{place}.content is {type(content).__name__}"
        if isinstance(content, list):
            found = f"{place}.content is a list of parts; allowed: one text"
        elif turn.get("tool_calls"):
            found += f", and {place}.tool_calls stands for it; calls of tools are not trained on"
        raise BadRow(f"field '{field}' is not text", found)
    return Message(role, _text(content, field, f"{place}.content"))


def _hh_messages(text: str, field: str) -> Messages:
    if not text.startswith(_HH_START):
        raise BadRow(f"field '{field}' is text but not a dialogue")
    _, *pieces = _HH_TURN.split(text)
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    return tuple(
        Message(_HH_ROLES[speaker], _text(content, field, f"turn {number}").strip())
        for number, (speaker, content) in enumerate(turns, start=1)
    )


def _text(text: str, field: str, place: str = "") -> str:
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
