"""Records parsed from the rows of a file, and the checks of the texts and turns in them.

Text that starts with "\\n\\nHuman:" is a dialogue in the HH format, with the turns inside the text:
https://huggingface.co/datasets/Anthropic/hh-rlhf.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any, Generic, Literal, Self, TypeVar, get_args

from lightning_rlhf.core.errors import DataError, quoted

Row = Mapping[str, Any]
"""Columns of one row of a source. A format reads those with a value: Parquet fills absent ones with
null."""
MAX_CHARACTERS = 1_000_000
"""Maximum length of one text (a message, a prompt or a response) in characters."""
IDENTICAL = "chosen and rejected are identical"
"""Reason for leaving out a pair whose two responses are the same."""
UNPAIRED = "no other response to the prompt has another score"
"""Reason for leaving out a scored response."""
Unit = Literal["line", "row"]
"""Unit in which the rows of a source are numbered."""
T = TypeVar("T")
_SURROGATE = re.compile("[\ud800-\udfff]")
_HH_START = "\n\nHuman:"
_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_HH_ROLES: Mapping[str, Literal["user", "assistant"]] = {"Human": "user", "Assistant": "assistant"}


class BadRow(Exception):
    """Raised for a row that cannot be used."""

    def __init__(self, reason: str, detail: str = "", lacks: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.lacks = reason, lacks
        """Reason without the row's own content, to count rows by; field that it lacks, or ""."""


class UnusedRow(BadRow):
    """Raised for a sound row that holds nothing for the stage: it is always left out."""


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
        further = {key: turn[key] for key in _FURTHER.get(turn["role"], ()) if turn.get(key)}
        text = json.dumps(further, ensure_ascii=False) if further else ""
        return cls(turn["role"], turn["content"], text)

    def as_dict(self) -> dict[str, Any]:
        """Return the message as chat templates and rewards read it."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        return turn | json.loads(self.further) if self.further else turn

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Return the calls of tools in an assistant's turn."""
        return self.as_dict().get("tool_calls", [])  # type: ignore[no-any-return]


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
    is_answered: bool = False
    """True if the row holds more than a prompt; several rows may then share the prompt."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A response with a score, to be compared with others to the same prompt."""

    prompt: Messages
    response: str
    score: float
    is_graded: bool
    """True if a difference of two scores is the strength of a preference."""


@dataclass(frozen=True, slots=True)
class Label:
    """A prompt with a response that is good or bad."""

    prompt: Messages
    response: str
    is_good: bool


@dataclass(frozen=True)
class Rows(Generic[T]):
    """Usable rows of one source, in the order of the file."""

    source: str
    rows: tuple[T, ...]
    left_out: Counter[str]
    """Number of rows of the source that are not in `rows`, by reason."""
    unit: Unit
    numbers: tuple[int, ...]
    """Number of each row in the source, in `unit`, from 1."""

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, positions: Sequence[int]) -> Self:
        """Return the rows at these positions of `rows`."""
        numbers = tuple(self.numbers[i] for i in positions)
        return replace(self, rows=tuple(self.rows[i] for i in positions), numbers=numbers)


def counts_text(counts: Counter[str]) -> str:
    """Return counts as text, the most frequent first: "2 broken JSON, 1 repeated prompt"."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


def paired(read: Rows[Scored]) -> Rows[Preference]:
    """Return the pairs of responses to one prompt with different scores, in the file's order."""
    by_prompt: dict[Messages, list[int]] = defaultdict(list)
    for i, row in enumerate(read.rows):
        by_prompt[row.prompt].append(i)
    pairs: list[Preference] = []
    numbers: list[int] = []
    used: set[int] = set()
    for two in chain.from_iterable(combinations(group, 2) for group in by_prompt.values()):
        better, worse = sorted(two, key=lambda i: -read.rows[i].score)
        high, low = read.rows[better], read.rows[worse]
        if high.score != low.score and high.response.strip() != low.response.strip():
            margin = high.score - low.score if high.is_graded else None
            pairs.append(Preference(high.prompt, high.response, low.response, margin))
            numbers.append(read.numbers[better])
            used.update(two)
    left_out = read.left_out + Counter({UNPAIRED: len(read) - len(used)})
    if not pairs:
        raise DataError(f"{read.source} holds no pair of responses: {counts_text(left_out)}")
    return Rows(read.source, tuple(pairs), left_out, read.unit, tuple(numbers))


def labelled(read: Rows[Preference | Scored]) -> Rows[Label]:
    """Return responses with labels, in the file's order: both of a pair, or those with a score,
    which are good above 0. Raises DataError where all of them are good, or bad."""
    found: list[Label] = []
    numbers: list[int] = []
    for row, number in zip(read.rows, read.numbers, strict=True):
        if isinstance(row, Scored):
            sides = [(row.response, row.score > 0)]
        else:
            sides = [(row.chosen, True), (row.rejected, False)]
        found += [Label(row.prompt, *side) for side in sides]
        numbers += [number] * len(sides)
    if len({row.is_good for row in found}) == 1:
        lacking, allowed = not found[0].is_good, "responses with either label, or pairs"
        raise DataError(f"{read.source} has no row with the label {lacking}; allowed: {allowed}")
    return Rows(read.source, tuple(found), read.left_out, read.unit, tuple(numbers))


def prompt_row(messages: Messages) -> dict[str, Any]:
    """Return a prompt as rewards and judges read it: as text, and as its turns."""
    return {"prompt": prompt_text(messages), "messages": [turn.as_dict() for turn in messages]}


def prompt_text(messages: Messages) -> str:
    """Return a single user message unchanged; a longer dialogue with the role before each turn."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{turn.role.capitalize()}: {turn.content}" for turn in messages)


def missing(field: str, row: Row, needed: str) -> BadRow:
    """Return the error for a field that the row lacks; needed: description of what is allowed."""
    found = ", ".join(map(repr, row)) or "none"
    return BadRow(f"field {field!r} is missing", f"found {found[:200]}; {needed}", field)


def checked_text(text: Any, field: str, place: str = "") -> str:
    """Return a text that can be used. Raises BadRow for any other value.

    place: position of the text within the field, if the field holds more than one text.
    """
    if not isinstance(text, str):
        raise BadRow(f"field '{field}' is not text", f"{place or 'it'} is {type(text).__name__}")
    for holds, fault in (
        (not text.strip(), "is empty or blank"),
        (len(text) > MAX_CHARACTERS, f"is longer than {MAX_CHARACTERS:,} characters"),
        ("\x00" in text, "holds a null byte"),
        (_SURROGATE.search(text), "holds half a surrogate pair, which UTF-8 cannot express"),
    ):
        if holds:
            raise BadRow(f"field '{field}' {fault}", place)
    return text


def text_in(row: Row, field: str) -> str:
    """Return the text in a field. Raises BadRow if it is missing, of another type or unusable."""
    if row.get(field) is None:
        raise missing(field, row, f"{field!r} is a text")
    return checked_text(row[field], field)


def dialogue(row: Row, field: str) -> Messages:
    """Return the turns in `field`, after the row's prompt if it has one."""
    prompt = turns_in(row["prompt"], "prompt", "user") if "prompt" in row else ()
    value = row[field]
    if not prompt and isinstance(value, str) and not value.startswith(_HH_START):
        raise missing("prompt", row, f"{field!r} is a text, which answers one")
    turns = turns_in(value, field, "assistant")
    return turns if turns[: len(prompt)] == prompt else (*prompt, *turns)


def split_last(dialogue: Messages, field: str) -> Demonstration:
    """Return the turns before the last, and the text of the last, which must be the assistant's."""
    *turns, last = dialogue
    if last.role != "assistant":
        raise BadRow(f"the last turn of '{field}' is not the assistant's", f"found {last.role}")
    return Demonstration(checked_prompt(tuple(turns)), last.content)


def checked_prompt(prompt: Messages) -> Messages:
    """Return the turns if they can be responded to; raise BadRow otherwise."""
    if not prompt or prompt[-1].role not in ("user", "tool"):
        raise BadRow("the prompt does not end with a user turn")
    if any(turn.role == "system" for turn in prompt[1:]):
        raise BadRow("a system turn stands after the first turn")
    return prompt


def turns_in(value: Any, field: str, plain: Role | None = None) -> Messages:
    """Return the turns of a list of messages, or of a text in the HH format.

    plain: role of the one turn that any other text is; None refuses it.
    """
    if isinstance(value, str) and value.startswith(_HH_START):
        if field == "prompt":  # some copies of the HH data end it with the marker of the next turn
            value = value.rstrip().removesuffix("\n\nAssistant:")
        _, *pieces = _HH_TURN.split(value)
        turns = enumerate(zip(pieces[::2], pieces[1::2], strict=True), start=1)
        return tuple(
            Message(_HH_ROLES[speaker], checked_text(content, field, f"turn {number}").strip())
            for number, (speaker, content) in turns
        )
    if isinstance(value, str):
        if plain is None:
            raise BadRow(f"field '{field}' is text but not a dialogue")
        return (Message(plain, checked_text(value, field)),)
    if not isinstance(value, list) or not value:
        found = f"found {quoted(value)[:100]}"
        raise BadRow(f"field '{field}' is neither text nor a list of one message or more", found)
    last = len(value) - 1
    return tuple(_message(turn, field, f"{field}[{i}]", i == last) for i, turn in enumerate(value))


def _message(turn: Any, field: str, place: str, is_last: bool) -> Message:
    """Return a turn; only before the last may calls of tools stand for the text."""
    if not isinstance(turn, dict) or "role" not in turn:
        found = f"has keys {quoted([*turn])}" if isinstance(turn, dict) else f"is {quoted(turn)}"
        raise BadRow(f'a turn of \'{field}\' is not {{"role", "content"}}', f"{place} {found}")
    role, content = turn["role"], turn.get("content")
    if role not in get_args(Role):
        known = f"known are {', '.join(get_args(Role))}"
        raise BadRow(f"unknown role in '{field}'", f"found {role!r} in {place}.role; {known}")
    if role == "assistant" and (calls := turn.get("tool_calls")):
        turn = turn | {"tool_calls": _tool_calls(calls, field, f"{place}.tool_calls")}
        content = content or (None if is_last else "")
    if content != "" or role != "assistant" or not turn.get("tool_calls"):
        checked_text(content, field, f"{place}.content")
    message = Message.of(turn | {"content": content})
    if message.further:
        checked_text(message.further, field, place)
    return message


def _tool_calls(value: Any, field: str, place: str) -> list[dict[str, Any]]:
    """Return calls of tools with their arguments as objects, as chat templates read them."""
    calls: list[dict[str, Any]] = []
    for i, call in enumerate(value if isinstance(value, list) else [value]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            found = f'{place}[{i}] is not {{"function": {{"name", "arguments"}}}}'
            raise BadRow(f"a call of a tool in '{field}' has no name", found)
        if isinstance(function.get("arguments"), str):
            with suppress(ValueError, RecursionError):  # text that is no JSON stays as it is
                function = function | {"arguments": json.loads(function["arguments"])}
        calls.append(call | {"function": function})
    return calls
