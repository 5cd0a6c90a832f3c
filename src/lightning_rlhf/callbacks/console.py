"""One line on the console, for every room that tells the user something."""

from __future__ import annotations

from rich import get_console

from lightning_rlhf.core.visible import visible


def say(message: str, style: str = "") -> None:
    """Print a line for the user: no markup, and nothing in it that a terminal would obey.

    style: a style of Rich, as "yellow".
    """
    get_console().print(
        visible(message), style=style, markup=False, highlight=False, soft_wrap=True
    )
