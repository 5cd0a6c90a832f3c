"""SIGTERM and SIGINT end a run between two steps; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich import get_console

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAID = "\nending after this step, with a checkpoint; a second {} ends at once\n"


class Stopped(SystemExit):
    """The run was told to end by a signal; the exit status is 128 + its number, as a shell's."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)


class Stop:
    """Which signal came, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Take note, or end the process if it was told before."""
        if self.signal is not None:
            get_console().show_cursor()
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self.signal = signal.Signals(signum)
        # A handler may interrupt a print, within which Python's own streams refuse another one.
        os.write(2, SAID.format(self.signal.name).encode())

    def obey(self) -> None:
        """Raise Stopped if a signal came."""
        if self.signal is not None:
            raise Stopped(self.signal)


@contextmanager
def deferred_signals(stop: Stop) -> Iterator[None]:
    """Signals are noted in `stop`, for the block to obey between two steps.

    A signal that the process ignores, as a job in the background does SIGINT, stays ignored.
    Raises Stopped at the latest where the block ends.
    """
    # Here and not above: the command imports this file before it knows whether it has to train.
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    is_main = threading.current_thread() is threading.main_thread()
    heard = [s for s in SIGNALS if is_main and signal.getsignal(s) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, stop.receive) for signum in heard}
    try:
        yield
        stop.obey()
    except SIGTERMException as error:  # Lightning's own, where it looks between two of our hooks
        raise Stopped(signal.SIGTERM) from error
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
