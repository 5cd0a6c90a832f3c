"""A replayed update on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE
from rich.console import JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_rlhf.replay.replayed import (
    COLUMNS,
    ReplayedResponse,
    ReplayedToken,
    cells,
    heading,
    legend,
    order,
)
from lightning_rlhf.report.token_text import marked, scale

LOOKS = (
    "a token is green where its advantage is above 0, red below, bold from half of the largest on; "
    "underlined where it is clipped"
)


def on_terminal(responses: Sequence[ReplayedResponse], batch: int) -> Iterator[RenderableType]:
    """Yield for each response its prompt, its tokens coloured by advantage, and their numbers.

    A legend of the numbers comes last, next to the cursor.
    batch: number of responses of the iteration.
    """
    largest = scale([token.advantage for r in responses for token in r.tokens])
    for response in responses:
        yield Text(f"\n{heading(response)}", style="bold")
        yield Text(marked(response.prompt), style="dim")
        text = Text()
        for token in response.tokens:
            text.append(marked(token.text), style=style(token, largest))
        yield text
        shown = [cells(token) for token in response.tokens]
        table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
        for name in COLUMNS[: len(shown[0])]:
            side: JustifyMethod = "left" if name in ("token", "clipped") else "right"
            table.add_column(
                name.replace(" ", "\n"), justify=side, overflow="fold", no_wrap=name != "token"
            )
        for token, row in zip(response.tokens, shown, strict=True):
            table.add_row(Text(row[0], style=style(token, largest)), *row[1:])
        yield table
    yield Text(f"shown: {order(len(responses), batch)}", style="dim")
    yield Text(f"colours: {LOOKS}", style="dim")
    for name, meaning in legend(responses).items():
        yield Text(f"{name}: {meaning}", style="dim")


def style(token: ReplayedToken, largest: float) -> str:
    """Return the style of a token by its advantage, and underlined where clipped.

    Green above 0, red below, bold from half of `largest` on.
    """
    words = ["green" if token.advantage > 0 else "red" if token.advantage < 0 else "default"]
    words += ["bold"] * (abs(token.advantage) > largest / 2)
    words += ["underline"] * token.clipped
    return " ".join(words)
