"""Escaping of foreign text for display: prompts, responses, answers of servers, names, overrides.

A terminal obeys control characters (they move the cursor, set its title, hide later text), and
bidirectional ones reorder a line. Here they are replaced by their escapes.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories that are escaped: control, format, half of a surrogate pair, line separator,
paragraph separator."""
JOINERS = "\u200c\u200d"
"""Format characters that are used in the spelling of many languages and of emoji."""


def visible(text: str) -> str:
    r"""Return `text` with each character that a terminal would obey or hide as its escape.

    "\x1b[31m" -> "\\x1b[31m". Newlines stay; `visible_line` shows these as well.
    """
    if text.isprintable():
        return text
    return "".join(escape(c) if is_hidden(c) and c != "\n" else c for c in text)


def visible_line(text: str) -> str:
    r"""Return `text` in one line: as `visible`, a newline is shown as \n."""
    return visible(text).replace("\n", "\\n")


def json_line(value: Any) -> str:
    """Return `value` as JSON in one line, every hidden character in it as JSON's own escape."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(json.dumps(c)[1:-1] if is_hidden(c) else c for c in text)


def is_hidden(character: str) -> bool:
    """Return whether a terminal would obey the character, or not show it."""
    return unicodedata.category(character) in CATEGORIES and character not in JOINERS


def escape(character: str) -> str:
    r"""Return Python's escape of a character, for example \x1b or \u202e."""
    return character.encode("unicode_escape").decode("ascii")
