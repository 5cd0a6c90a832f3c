"""Work in a thread that nobody has to wait for, and work that is handed to another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Return the future of `work()`, which runs in a daemon thread of its own.

    Unlike a thread pool's, the thread does not keep the process from ending.
    """
    future: Future[T] = Future()
    # Now, so that a cancelled wait does not disturb the thread.
    threading.Thread(target=_settle, args=(future, work), daemon=True).start()
    return future


class Handed:
    """Work that other threads hand to the one that calls `do_all`, one piece at a time."""

    def __init__(self) -> None:
        self._pieces: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def hand(self, work: Callable[[], T]) -> Future[T]:
        """Return the future of `work()`."""
        future: Future[T] = Future()
        self._pieces.put((future, work))
        return future

    def do_all(self) -> None:
        """Do what is handed over until `end`."""
        while (piece := self._pieces.get()) is not None:
            _settle(*piece)

    def end(self) -> None:
        """End `do_all`, once what was handed over before is done."""
        self._pieces.put(None)


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # it is raised where the result is asked for
        future.set_exception(error)
    else:
        future.set_result(result)
