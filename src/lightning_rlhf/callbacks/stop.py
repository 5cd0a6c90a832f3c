"""SIGTERM and SIGINT: the first signal ends a run after the current step, the second at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich import get_console

from lightning_rlhf.parallel.world import IN_LAUNCHER, world

if TYPE_CHECKING:
    from lightning_rlhf.parallel.replicas import Replicas

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MESSAGE = "\nending after this step, with a checkpoint; a second {} ends at once\n"
"""Message printed at the first signal."""
REPEATED_S = 0.5
"""Seconds in which a further signal counts as the first one, repeated: Linux may send the signal
for the end of a parent once for each of the parent's threads."""


class Stopped(SystemExit):
    """Exit of a run because of a signal, with exit status 128 + signal number, as in a shell."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class Stop:
    """The first signal received in a run, if any."""

    def __init__(self, message: str = MESSAGE) -> None:
        """Begin without a signal; message: text printed at the first, with a place for its name."""
        self.message = message
        self.signal: signal.Signals | None = None
        """The signal received; None before the first one."""
        self.time = 0.0
        """Time at which it was received, in seconds of a monotonic clock."""
        self.is_printed = False
        """True if the message was printed."""

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Store the signal, or end the process if a signal was received before."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.time = signal.Signals(signum), now
        elif now - self.time > REPEATED_S:
            get_console().show_cursor()
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        is_passed_on = os.environ.get(IN_LAUNCHER) == str(os.getppid())  # by who has printed it
        if world().rank == 0 and not is_passed_on and not self.is_printed:
            self.is_printed = True
            # A handler may interrupt a print, and Python's streams refuse a print within a print.
            os.write(2, self.message.format(self.signal.name).encode())

    def obey(self, replicas: Replicas | None = None) -> None:
        """Raise Stopped if a signal was received, here or in another process of the run."""
        if replicas is not None and (found := replicas.largest(self.signal or 0)):
            self.signal = signal.Signals(found)
        if self.signal is not None:
            raise Stopped(self.signal)

    def listen(self) -> dict[signal.Signals, Any]:
        """Receive SIGTERM and SIGINT; return the handlers that were there before.

        A signal that the process ignores, as a background job ignores SIGINT, stays ignored.
        """
        is_main = threading.current_thread() is threading.main_thread()
        handled = [s for s in SIGNALS if is_main and signal.getsignal(s) != signal.SIG_IGN]
        return {signum: signal.signal(signum, self.receive) for signum in handled}


@contextmanager
def deferred_signals(stop: Stop) -> Iterator[None]:
    """Store signals in `stop` during the block, which calls `stop.obey` between two steps.

    Raises Stopped at the end of the block at the latest.
    """
    # Imported here, since the command line imports this file without necessarily training.
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    before = stop.listen()
    try:
        yield
        stop.obey()
    except SIGTERMException as error:  # raised by Lightning's own check between two hooks
        raise Stopped(signal.SIGTERM) from error
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
