"""Tokenisation of rows within the length limits.

`long_prompts=cut` drops the oldest turns, except a system turn, down to the last user turn if
necessary; then it drops the start of that turn's text, so that the template around it stays whole.
`long_responses=cut` keeps the first tokens and adds no end token, so that no response is taught to
end where it did not.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from os.path import commonprefix
from typing import Any, Generic, TypeVar

from lightning_rlhf.core.errors import DataError, counted, require
from lightning_rlhf.data import rows
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.config import DataConfig
from lightning_rlhf.io.console import print_line

E = TypeVar("E")
_OTHER_TEXT = "\ue000"
"""Text of a turn that begins and ends with a character of which no other text is made; it shows
where the template writes the turn's own."""
FEW = 20
"""Number of rows below which a note is printed: each is 5% of the training or validation rows."""
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
"""Start of a block by which a template marks what the assistant wrote."""


@dataclass(frozen=True, slots=True)
class DemonstrationTokens:
    """Tokens of a prompt and of the response to imitate."""

    prompt: Sequence[int]
    response: Sequence[int]
    learned: Sequence[int] = ()
    """Positions of the tokens of the prompt to imitate as well, ascending."""

    @property
    def length(self) -> int:
        """Return the number of tokens of the whole sequence."""
        return len(self.prompt) + len(self.response)

    @property
    def target_tokens(self) -> Sequence[int]:
        """Return the tokens to imitate, those of the prompt first."""
        return [*(self.prompt[i] for i in self.learned), *self.response]


@dataclass(frozen=True, slots=True)
class LabelTokens(DemonstrationTokens):
    """Tokens of a prompt and of a response that is good or bad."""

    label: bool = True
    """True for a good response."""


@dataclass(frozen=True, slots=True)
class PreferenceTokens:
    """Tokens of a prompt, of the preferred response and of the other one."""

    prompt: Sequence[int]
    chosen: Sequence[int]
    rejected: Sequence[int]
    margin: float = 0.0
    """Strength of the preference, a number >= 0; 0 if the row does not give one."""

    @property
    def length(self) -> int:
        """Return the number of tokens of the longer sequence."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens of a prompt to respond to."""

    prompt: Sequence[int]
    index: int
    """Position of the prompt among the rows that were read."""

    @property
    def length(self) -> int:
        """Return the number of tokens of the prompt."""
        return len(self.prompt)


@dataclass(frozen=True)
class Tokenised(Generic[E]):
    """Rows within the length limits as tokens, in the order of the file."""

    examples: tuple[E, ...]
    dropped: Counter[str]
    """Number of rows that are not in `examples`, by reason."""
    cut: Counter[str]
    """Number of rows in `examples` that were truncated, by the part that was cut."""
    numbers: tuple[int, ...]
    """Number of each example's row in the source, as in `Rows.numbers`."""

    @property
    def too_long(self) -> float:
        """Return the share of prompts that were cut, or dropped, for their length."""
        dropped = self.dropped.total()
        return (self.cut["prompt cut"] + dropped) / (len(self.examples) + dropped)


class _Dropped(Exception):
    """Raised for a row that does not fit; the message is the reason by which it is counted."""


def tokenise(read: rows.Rows[Any], chat: ChatFormat, config: DataConfig) -> Tokenised[Any]:
    """Return the tokens of demonstrations, of preferences, of labelled responses or of prompts.

    With data.train_on=all the earlier turns of the assistant are learned too; pairs whose two
    responses have the same tokens are dropped; prompts keep their positions in `read`.

    Raises DataError where no row is left.
    """
    dropped: Counter[str] = Counter()
    cuts: Counter[str] = Counter()
    examples: list[Any] = []
    numbers: list[int] = []

    # Arrays hold a token in four bytes; a list of Python integers takes forty.
    @cache  # many rows often share a prompt
    def fit(prompt: rows.Messages) -> tuple[rows.Messages, array[int], Sequence[str]]:
        tokens = chat.prompt_tokens(prompt)
        if len(tokens) <= config.max_prompt_tokens:
            return prompt, array("i", tokens), ()
        if config.long_prompts == "drop":
            raise _Dropped("prompt too long")
        fitting = _cut_prompt(prompt, chat, config.max_prompt_tokens)
        return fitting, array("i", chat.prompt_tokens(fitting)), ("prompt cut",)

    def response(text: str, cut: set[str]) -> array[int]:
        tokens = chat.response_tokens(text)
        if len(tokens) > config.max_response_tokens:
            if config.long_responses == "drop":
                raise _Dropped("response too long")
            cut.add("response cut")
        return array("i", tokens[: config.max_response_tokens])

    for index, row in enumerate(read.rows):
        try:
            messages, prompt, notes = fit(row.prompt)
            cut = set(notes)
            if isinstance(row, rows.Prompt):
                examples.append(PromptTokens(prompt, index))
            elif isinstance(row, rows.Preference):
                chosen, rejected = response(row.chosen, cut), response(row.rejected, cut)
                if chosen == rejected:
                    raise _Dropped("chosen and rejected are the same tokens")
                examples.append(PreferenceTokens(prompt, chosen, rejected, row.margin or 0.0))
            elif isinstance(row, rows.Label):
                answer = response(row.response, cut)
                examples.append(LabelTokens(prompt, answer, label=row.is_good))
            else:
                answer = response(row.response, cut)
                learned = turn_targets(chat, messages) if config.train_on == "all" else ()
                examples.append(DemonstrationTokens(prompt, answer, array("i", learned)))
        except _Dropped as reason:
            dropped[str(reason)] += 1
        else:
            numbers.append(read.numbers[index])
            cuts.update(cut)
    if not examples:
        raise DataError(
            f"no row of {read.source} is left: {rows.counts_text(dropped)}; raise "
            f"data.max_prompt_tokens ({config.max_prompt_tokens}) or data.max_response_tokens "
            f"({config.max_response_tokens}), or set data.long_prompts=cut, data.long_responses=cut"
        )
    return Tokenised(tuple(examples), dropped, cuts, tuple(numbers))


def _cut_prompt(prompt: rows.Messages, chat: ChatFormat, limit: int) -> rows.Messages:
    system = tuple(turn for turn in prompt[:1] if turn.role == "system")
    starts = [i for i, turn in enumerate(prompt) if turn.role == "user"]
    for start in starts[1:]:
        fitting = (*system, *prompt[start:])
        if len(chat.prompt_tokens(fitting)) <= limit:
            return fitting
    if prompt[-1].role != "user":
        raise _Dropped("prompt too long to cut: it ends with the turn of a tool")
    text = prompt[-1].content.rstrip()

    def last_characters(count: int) -> rows.Messages:
        return (*system, rows.Message("user", text[-count:].lstrip()))

    counts = range(1, len(text))
    fits = bisect_right(counts, limit, key=lambda n: len(chat.prompt_tokens(last_characters(n))))
    if not fits:
        raise _Dropped("prompt too long to cut: the chat template alone exceeds the limit")
    return last_characters(fits)


def turn_targets(chat: ChatFormat, prompt: rows.Messages) -> list[int]:
    """Return the positions in `chat.prompt_tokens(prompt)` of what the assistant wrote.

    A template with `{% generation %}` marks it. Of any other it is the text of each turn of the
    assistant as the template writes it, its calls of tools, and the end token after them, as in
    `chat.response_tokens`.

    Raises ConfigError where the tokenizer does not know which characters its tokens stand for.
    """
    turns = [i for i, turn in enumerate(prompt) if turn.role == "assistant"]
    if not turns:
        return []
    tokenizer = chat.tokenizer
    name = f"tokenizer {tokenizer.name_or_path!r}"
    allowed = f"last, as {name} does not know the characters of its tokens"
    require(tokenizer.is_fast, "data.train_on", "all", allowed)
    if _GENERATION.search(tokenizer.get_chat_template()):
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        options |= {"add_generation_prompt": True, **chat.template_kwargs}
        encoded = tokenizer.apply_chat_template([turn.as_dict() for turn in prompt], **options)
        return [i for i, is_marked in enumerate(encoded["assistant_masks"]) if is_marked]
    text = chat.opened(prompt)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets: list[tuple[int, int]] = encoded.offset_mapping
    found: list[int] = []
    for i in turns:
        start, end, marker = _span(chat, text, prompt, i)
        written = [k for k, (a, b) in enumerate(offsets) if b > start and a < end]
        if marker is not None:
            last = next(k for k, (_, b) in enumerate(offsets) if b > marker)
            # A space before the marker may be a token without characters of its own.
            written = [*range(written[0], last), last] if marker == end else [*written, last]
        found += written
    return found


def _span(
    chat: ChatFormat, text: str, prompt: rows.Messages, i: int
) -> tuple[int, int, int | None]:
    """Return where turn i starts and ends in the rendered prompt, and where its end marker is.

    It is what changes when the turn has another text, up to the end marker if it calls tools.
    """
    other = (*prompt[:i], replace(prompt[i], content=_OTHER_TEXT), *prompt[i + 1 :])
    changed = chat.opened(other)
    start = len(commonprefix((text, changed)))  # noqa: RUF071 - the texts are no paths
    reversed_ends = text[start:][::-1], changed[start:][::-1]
    end = len(text) - len(commonprefix(reversed_ends))  # noqa: RUF071
    if chat.end_marker is None:
        return start, end, None
    if prompt[i].tool_calls:
        end = max(end, text.find(chat.end_marker, end))
    marker = end + len(text[end:]) - len(text[end:].lstrip())
    is_written = start < end and text.startswith(chat.end_marker, marker)
    return start, end, marker if is_written else None


def print_lengths(
    what: str, read: rows.Rows[Any], tokenised: Tokenised[Any], *, to_validate: bool = False
) -> None:
    """Print the number of rows to train or validate on, and of those dropped or cut."""
    count = len(tokenised.examples)
    shown = counted(count, what) + f" to validate on, from {read.source}" * to_validate
    lost = read.left_out + tokenised.dropped
    notes = [f"{n} left out ({reason})" for reason, n in sorted(lost.items())]
    notes += [f"{n} with {reason}" for reason, n in sorted(tokenised.cut.items())]
    print_line(", ".join([shown, *notes, *note_on_few(count, to_validate=to_validate)]))


def note_on_few(count: int, *, to_validate: bool) -> list[str]:
    """Return a note where there are fewer than FEW rows to train or to validate on."""
    more = "data.max_val_rows, data.val_fraction, or a file of their own, gives more"
    note = f"too few to measure with ({more})" if to_validate else "too few to learn much from"
    return [note] * (count < FEW)
