"""Tokens of a prompt that the assistant wrote in its earlier turns, for a loss on all of them."""

from __future__ import annotations

import re
from dataclasses import replace

from lightning_rlhf.core.errors import require
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Messages

_OTHER_TEXT = "\ue000"
"""Text of a turn that begins and ends with a character of which no other text is made; it shows
where the template writes the turn's own."""
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
"""Start of a block by which a template marks what the assistant wrote."""


def turn_targets(chat: ChatFormat, prompt: Messages) -> list[int]:
    """Return the positions in `chat.prompt_tokens(prompt)` of what the assistant wrote.

    A template with `{% generation %}` marks it. Of any other it is the text of each turn of the
    assistant as the template writes it, its calls of tools, and the end token after them, as in
    `chat.response_tokens`.

    Raises:
        ConfigError: the tokenizer does not know which characters its tokens stand for.
    """
    turns = [i for i, turn in enumerate(prompt) if turn.role == "assistant"]
    if not turns:
        return []
    tokenizer = chat.tokenizer
    require(tokenizer.is_fast, "data.train_on", "all",
            f"last, as tokenizer {tokenizer.name_or_path!r} does not know the characters of its "
            "tokens")  # fmt: skip
    if _GENERATION.search(tokenizer.get_chat_template()):
        rows = [turn.as_dict() for turn in prompt]
        encoded = tokenizer.apply_chat_template(
            rows, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=True,
            **chat.template_kwargs,
        )  # fmt: skip
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


def _span(chat: ChatFormat, text: str, prompt: Messages, i: int) -> tuple[int, int, int | None]:
    """Return where turn i starts and ends in the rendered prompt, and where its end marker is.

    It is what changes when the turn has another text, up to the end marker if it calls tools.
    """
    other = (*prompt[:i], replace(prompt[i], content=_OTHER_TEXT), *prompt[i + 1 :])
    changed = chat.opened(other)
    start = _common(text, changed)
    end = len(text) - _common(text[start:][::-1], changed[start:][::-1])
    if chat.end_marker is None:
        return start, end, None
    if prompt[i].tool_calls:
        end = max(end, text.find(chat.end_marker, end))
    marker = end + len(text[end:]) - len(text[end:].lstrip())
    is_written = start < end and text.startswith(chat.end_marker, marker)
    return start, end, marker if is_written else None


def _common(one: str, other: str) -> int:
    """Return the number of characters that two texts have in common at their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
