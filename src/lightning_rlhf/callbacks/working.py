"""Progress display of long tasks outside of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import TypeVar

from rich import get_console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from lightning_rlhf.callbacks.pace import clock_text
from lightning_rlhf.callbacks.terminal import print_line

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
        self._what = what
        self._total = total
        self._line = line
        self._done = 0
        self._stopped = Event()
        self._bar: Progress | None = None

    def __enter__(self) -> Working:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the display; `with` blocks call it."""
        self._start = monotonic()
        if self._total is not None and get_console().is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=get_console(),
                transient=True,
            )
            self._task = self._bar.add_task(self._what, total=self._total)
            self._bar.start()
        else:
            Thread(target=self.print_until, args=(self._stopped.wait,), daemon=True).start()

    def stop(self) -> None:
        """Stop the display; `with` blocks call it."""
        self._stopped.set()
        if self._bar is not None:
            self._bar.stop()

    def print_until(self, stops: Callable[[float], bool]) -> None:
        """Print a line each time `stops(PERIOD_S)` returns False, until it returns True."""
        while not stops(PERIOD_S):
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
            self._bar.advance(self._task, done)

    def track(self, items: Iterable[T], size: Callable[[T], int] = lambda _: 1) -> Iterator[T]:
        """Yield the items; each counts as `size(item)` units once the next one is requested."""
        for item in items:
            yield item
            self.advance(size(item))
