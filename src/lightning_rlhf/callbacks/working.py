"""Progress of what takes its time outside of training."""

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

from lightning_rlhf.callbacks.console import say
from lightning_rlhf.callbacks.pace import clock_text

T = TypeVar("T")
PERIOD_S = 10.0
"""Seconds after which a line is due, and after each line."""


class Working:
    """Tells what is being done as long as its `with` block runs, and how far it has come.

    On a terminal it is a bar, if a total is known, which goes when the block ends. Elsewhere it is
    a line every PERIOD_S seconds; a block that takes less prints nothing.
    """

    def __init__(
        self, what: str, total: int | None = None, *, line: Callable[[], str] | None = None
    ) -> None:
        """
        Args:
            what: the task, in words.
            total: how much there is to do, in the units of `advance`; None where unknown.
            line: returns the line to print; None prints `what`, what is done and the time.
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
        """Begin, where no `with` block can be written."""
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
            Thread(target=self.say_until, args=(self._stopped.wait,), daemon=True).start()

    def stop(self) -> None:
        """End what `start` began."""
        self._stopped.set()
        if self._bar is not None:
            self._bar.stop()

    def say_until(self, stops: Callable[[float], bool]) -> None:
        """Print a line each time that `stops(PERIOD_S)` returns False, until it returns True."""
        while not stops(PERIOD_S):
            say(self.line)

    @property
    def line(self) -> str:
        """The line to print: the task, how much of it is done and the time it has taken."""
        if self._line is not None:
            return self._line()
        done = "" if self._total is None else f" {self._done}/{self._total}"
        return f"{self._what}{done}  {clock_text(monotonic() - self._start)} elapsed"

    def advance(self, done: int = 1) -> None:
        """Note that so much more is done."""
        self._done += done
        if self._bar is not None:
            self._bar.advance(self._task, done)

    def track(self, items: Iterable[T], size: Callable[[T], int] = lambda _: 1) -> Iterator[T]:
        """Yield the items; `size` of one is done when the next is asked for."""
        for item in items:
            yield item
            self.advance(size(item))
