"""Work in a thread that nobody has to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Return the future of `work()`, which runs in a daemon thread of its own.

    Unlike a thread pool's, the thread does not keep the process from ending.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that a cancelled wait does not disturb the thread

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
