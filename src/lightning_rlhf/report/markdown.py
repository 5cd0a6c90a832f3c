"""Markdown text and tables that are safe for arbitrary content."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lightning_rlhf.io.visible import visible

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&])")


def plain(text: str, characters: int) -> str:
    """Return `text` escaped, so that it is displayed literally, in one line.

    Runs of white space become one space. The text is cut to `characters` before Markdown's and
    HTML's special characters are escaped.
    """
    line = visible(" ".join(text.split()))
    cut = line if len(line) <= characters else line[: characters - 1] + "…"
    return _SPECIAL.sub(r"\\\1", cut) if cut else "*(empty)*"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int]) -> str:
    """Return a table of cells that are already Markdown; the columns `right` are right-aligned."""
    rule = ["---:" if column in right else "---" for column in range(len(heading))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, rule, *rows))
