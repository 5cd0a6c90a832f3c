"""Work in a daemon thread, and work that is handed to another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Return the future of `work()`, which runs in a daemon thread of its own.

    Unlike the threads of a pool, this one does not keep the process from ending.
    """
    future: Future[T] = Future()
    threading.Thread(target=_settle, args=(future, work), daemon=True).start()
    return future


class Handed:
    """Queue of work that other threads hand to the one that calls `do_all`, one piece at a time."""

    def __init__(self) -> None:
        self._pieces: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def hand(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work` and return its future."""
        future: Future[T] = Future()
        self._pieces.put((future, work))
        return future

    def do_all(self) -> None:
        """Do the queued work until `end` is called."""
        while (piece := self._pieces.get()) is not None:
            _settle(*piece)

    def end(self) -> None:
        """End `do_all` after the work that is queued so far."""
        self._pieces.put(None)


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work` and settle `future` with its result or error; do nothing if it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # raised again by `future.result()`
        future.set_exception(error)
    else:
        future.set_result(result)
