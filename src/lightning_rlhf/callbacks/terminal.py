"""Console output of one line, for all packages."""

from __future__ import annotations

from rich import get_console

from lightning_rlhf.io.visible import visible


def print_line(message: str, style: str = "") -> None:
    """Print a line without markup, with control characters made visible.

    style: a Rich style, for example "yellow".
    """
    get_console().print(
        visible(message), style=style, markup=False, highlight=False, soft_wrap=True
    )
