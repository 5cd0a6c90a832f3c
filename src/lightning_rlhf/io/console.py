"""Console output: escaping of foreign text, lines, progress outside of training.

A terminal obeys control characters (they move the cursor, set its title, hide later text), and
bidirectional ones reorder a line. Here they are replaced by their escapes.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from threading import Event, Thread
from time import monotonic
from typing import Any, TypeVar

from rich import get_console, progress
from rich.console import RenderableType
from rich.progress import Progress, ProgressColumn
from rich.text import Text

CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories that are escaped: control, format, half of a surrogate pair, line separator,
paragraph separator."""
JOINERS = "\u200c\u200d"
"""Format characters that are used in the spelling of many languages and of emoji."""


def visible(text: str) -> str:
    r"""Return `text` with each character that a terminal would execute or hide as its escape.

    "\x1b[31m" -> "\\x1b[31m". Newlines stay; `visible_line` shows these as well.
    """
    if text.isprintable():
        return text
    return "".join(ascii(c)[1:-1] if is_hidden(c) and c != "\n" else c for c in text)


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
    """Return whether a terminal would execute the character, or not show it."""
    return unicodedata.category(character) in CATEGORIES and character not in JOINERS


details = False
"""True where `print_detail` prints its lines, as with debug=true."""


def print_detail(message: str) -> None:
    """Print a line that debug=true alone shows."""
    if details:
        print_line(message, "dim")


def print_line(message: str, style: str = "", *, is_command: bool = False) -> None:
    """Print a line without markup, with control characters made visible.

    style: a Rich style, for example "yellow". is_command: True never breaks it.
    """
    console, text = get_console(), visible(message)
    lines = wrap_words(text, console.is_terminal and not is_command)
    console.print(Text(lines, style), soft_wrap=True)


def wrap_words(text: str, is_terminal: bool) -> str:
    """Return a text for a terminal, broken between words, else as it is.

    It stays whole where a word, as a path, is longer than a line.
    """
    width = get_console().width
    if not is_terminal or max(map(len, text.split()), default=0) > width:
        return text
    return "\n".join(line.plain.rstrip() for line in Text(text).wrap(get_console(), width))


def clock_text(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds: 3725 -> 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Bar(Progress):
    """A progress bar of one task on the terminal, with a line of text below it."""

    below = ""
    """Line below the bar; an empty text for none."""

    def __init__(
        self, what: str, total: int, time: ProgressColumn, *, done: int = 0, stays: bool = True
    ) -> None:
        """time: last column, which may show the field `times`; stays: False to erase it at last."""
        style = "bold" if stays else "none"
        name = progress.TextColumn("{task.description}", markup=False, style=style)
        bar = progress.BarColumn(bar_width=24), progress.MofNCompleteColumn()
        columns = progress.SpinnerColumn(), name, *bar, time
        super().__init__(*columns, console=get_console(), transient=not stays)
        self.add_task(what, completed=done, total=total, times="")

    def show(self, **changes: Any) -> None:
        """Change the task, as `Progress.update` does."""
        self.update(self.task_ids[0], **changes)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.below:
            yield Text(self.below, style="cyan")


T = TypeVar("T")
PERIOD_S = 10.0
"""Seconds before the first line, and between lines."""


class Working:
    """A context manager that displays a task and its progress while the block runs.

    On a terminal, if a total is known, it is a progress bar, removed when the block ends. Otherwise
    it prints a line every PERIOD_S seconds; a shorter block prints nothing.
    """

    def __init__(
        self, what: str, total: int | None = None, *, line: Callable[[], str] | None = None
    ) -> None:
        """Describe the task.

        what: description of the task.
        total: amount of work, in the units of `advance`; None where unknown.
        line: function that returns the line to print; None prints `what`, the progress and the
            elapsed time.
        """
        self._what, self._total, self._line = what, total, line
        self._done = 0
        self._stopped = Event()
        self._bar: Bar | None = None

    def start(self) -> Working:
        """Start the display; `with` blocks call it."""
        self._start = monotonic()
        if self._total is not None and get_console().is_terminal:
            self._bar = Bar(self._what, self._total, progress.TimeElapsedColumn(), stays=False)
            self._bar.start()
        else:
            Thread(target=self._print_lines, daemon=True).start()
        return self

    def stop(self, *error: object) -> None:
        """Stop the display; `with` blocks call it."""
        self._stopped.set()
        if self._bar is not None:
            self._bar.stop()

    __enter__, __exit__ = start, stop

    def _print_lines(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            print_line(self.line)

    @property
    def line(self) -> str:
        """Return the line to print: the task, its progress and the elapsed time."""
        if self._line is not None:
            return self._line()
        done = "" if self._total is None else f" {self._done}/{self._total}"
        return f"{self._what}{done}  {clock_text(monotonic() - self._start)} elapsed"

    def advance(self, done: int = 1) -> None:
        """Add `done` units to the finished amount of work."""
        self._done += done
        if self._bar is not None:
            self._bar.show(advance=done)

    def track(self, items: Iterable[T], size: Callable[[T], int] = lambda _: 1) -> Iterator[T]:
        """Yield the items; each counts as `size(item)` units once the next one is requested."""
        for item in items:
            yield item
            self.advance(size(item))
