"""Words and tables in Markdown, whatever the text holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lightning_rlhf.core.visible import visible

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&])")


def plain(text: str, characters: int) -> str:
    """`text` to be read as it is, in one line of `characters` at most: white space is one space,
    whatever Markdown or HTML would take for its own is escaped."""
    line = visible(" ".join(text.split()))
    cut = line if len(line) <= characters else line[: characters - 1] + "…"
    return _SPECIAL.sub(r"\\\1", cut) if cut else "*(empty)*"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int]) -> str:
    """A table of cells that are Markdown already; the columns `right` are set flush right."""
    rule = ["---:" if column in right else "---" for column in range(len(heading))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, rule, *rows))


def counted(number: int, noun: str) -> str:
    """ "1 pair", "2 pairs"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
