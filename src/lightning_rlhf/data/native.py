"""The package's own forms of a row.

Each is first turned into a dialogue, a tuple of messages, and then split before its last turn.
"""

from __future__ import annotations

from lightning_rlhf.core.wording import counted
from lightning_rlhf.data.fields import number_in
from lightning_rlhf.data.parsing import (
    IDENTICAL,
    BadRow,
    Row,
    check_prompt,
    dialogue,
    has,
    messages_in,
    missing,
    prompt_messages,
    split_last,
)
from lightning_rlhf.data.rows import Demonstration, Messages, Preference, Prompt, prompt_row

DEMONSTRATION_FIELDS = ("prompt", "response", "chosen", "messages")
"""Fields that are read from a row of demonstrations."""
PREFERENCE_FIELDS = ("prompt", "chosen", "rejected", "margin")
"""Fields that are read from a row of preferences; from a row of prompts all are, for the
rewards."""


def parse_demonstration(row: Row) -> Demonstration:
    """Parse {"prompt", "response"}, {"messages"}, or the chosen side of a preference.

    Raises:
        BadRow: the row cannot be used; states the reason.
    """
    if has(row, "response"):
        return Demonstration(*split_last(dialogue(row, "response"), "response"))
    if has(row, "chosen"):
        return Demonstration(*split_last(dialogue(row, "chosen"), "chosen"))
    if has(row, "messages"):
        return Demonstration(*split_last(messages_in(row["messages"], "messages"), "messages"))
    raise missing("response", row, 'a demonstration is {"prompt", "response"}, {"messages"} or '
                   '{"chosen", "rejected"}')  # fmt: skip


def parse_preference(row: Row) -> Preference:
    """Parse {"prompt", "chosen", "rejected"}, or two whole dialogues {"chosen", "rejected"}.

    Raises:
        BadRow: the row cannot be used; states the reason.
    """
    for field in ("chosen", "rejected"):
        if not has(row, field):
            raise missing(field, row, 'a preference is {"prompt", "chosen", "rejected"}')
    prompt, chosen = split_last(dialogue(row, "chosen"), "chosen")
    rejected_prompt, rejected = split_last(dialogue(row, "rejected"), "rejected")
    if prompt != rejected_prompt:
        raise BadRow("chosen and rejected differ before the last turn",
                     _difference(prompt, rejected_prompt))  # fmt: skip
    return preference(prompt, chosen, rejected, _margin(row))


def preference(prompt: Messages, chosen: str, rejected: str, margin: float | None) -> Preference:
    """Return the pair. Raises BadRow if its responses are the same."""
    if chosen.strip() == rejected.strip():
        raise BadRow(IDENTICAL)
    return Preference(prompt, chosen, rejected, margin)


def parse_prompt(row: Row) -> Prompt:
    """Parse {"prompt"} or {"messages"}, or the prompt of a demonstration or preference.

    Raises:
        BadRow: the row cannot be used; states the reason.
    """
    if has(row, "prompt"):
        messages = prompt_messages(row)
    elif has(row, "messages"):
        messages = messages_in(row["messages"], "messages")
    elif has(row, "chosen"):
        messages = split_last(dialogue(row, "chosen"), "chosen")[0]
    else:
        raise missing("prompt", row, 'a prompt is {"prompt"} or {"messages"}')
    if messages[-1].role == "assistant":
        messages = messages[:-1]
    return prompt_of(messages, row)


def prompt_of(messages: Messages, row: Row) -> Prompt:
    """Return the prompt with the other columns of its row. Raises BadRow unless it is one."""
    check_prompt(messages)
    others = {key: value for key, value in row.items() if key not in ("prompt", "messages")}
    return Prompt(messages, others | prompt_row(messages))


def is_answered(row: Row) -> bool:
    """Return whether the row holds more than a prompt; several rows may then share the prompt."""
    return any(has(row, field) for field in ("response", "completion", "chosen", "messages"))


def _difference(chosen: Messages, rejected: Messages) -> str:
    """Return a description of the first turn before the last in which two dialogues differ."""
    if chosen[: len(rejected)] == rejected or rejected[: len(chosen)] == chosen:
        count = len(chosen)
        turns = counted(count, "turn")
        return f"{turns} before the last of chosen, {len(rejected)} of rejected"
    pairs = zip(chosen, rejected, strict=False)
    number = next(i for i, (one, other) in enumerate(pairs, start=1) if one != other)
    return f"turn {number} is not the same"


def _margin(row: Row) -> float | None:
    try:
        margin = number_in(row, "margin")
    except BadRow:
        return None
    return margin if margin >= 0 else None
