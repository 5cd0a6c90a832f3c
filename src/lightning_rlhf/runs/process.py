"""Child processes that end with this process."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import BinaryIO

from lightning_rlhf.callbacks.stop import SIGNALS, Stopped

IN_RECIPE = "LIGHTNING_RLHF_IN_RECIPE"
"""Environment variable set for the stages of a recipe; the recipe prints the resume hint itself."""
IN_SWEEP = "LIGHTNING_RLHF_IN_SWEEP"
"""Environment variable set for a process that is a job of a sweep."""
STOPPED = "stopped"
"""Return value of a job of a sweep that a signal has ended, or kept from beginning."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: signal to send to a process when its parent ends."""


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: BinaryIO | None = None,
    stopped_by: Callable[[], int | None] | None = None,
) -> int:
    """Run a command to its end and return its exit status, below 0 where a signal ended it.

    A signal to this process is passed on, and the command is waited for. The command runs in a
    process group of its own, so that it gets Ctrl-C once, though a terminal sends it to a group.

    output: file for what the command prints; None for the output of this process.
    stopped_by: function that is called every second; once it returns a signal, the command gets
        SIGTERM.

    Raises Stopped afterwards if a signal came.
    """
    received: list[int] = []
    waiting: list[int] = []  # signals that came before the command was started
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if started:
            started[0].send_signal(signum)
        else:
            waiting.append(signum)

    heard = [s for s in (*SIGNALS, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, pass_on) for signum in heard}
    try:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, process_group=0,
            preexec_fn=partial(end_with, os.getpid()), stdout=output, stderr=output,
        )  # fmt: skip
        started.append(process)
        while waiting:
            process.send_signal(waiting.pop())
        while (status := process.poll()) is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(None if stopped_by is None else 1)
            if stopped_by is not None and stopped_by() is not None:
                process.terminate()
                stopped_by = None
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if received:
        raise Stopped(received[0])
    return status


def is_job() -> bool:
    """Return whether this process is a job of a sweep; those that it starts are none."""
    return os.environ.pop(IN_SWEEP, None) is not None


def end_with(parent: int) -> None:
    """Request SIGTERM for when the parent ends, even if killed; works on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the request
            os.kill(os.getpid(), signal.SIGTERM)
