"""A process that ends when this one is told to."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType

from lightning_rlhf.callbacks.stop import SIGNALS, Stopped

IN_RECIPE = "LIGHTNING_RLHF_IN_RECIPE"
"""Variable that is set for the stages of a recipe, which says itself how it goes on."""
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl."""


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end; its exit status, below 0 where a signal ended it.

    A signal to this process is passed on, and the command's end waited for. The command is in a
    process group of its own, so that Ctrl-C, which a terminal sends to all, comes once.

    Raises Stopped afterwards if a signal came.
    """
    received: list[int] = []
    waiting: list[int] = []  # for something to be sent to
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
            preexec_fn=partial(end_with, os.getpid()),
        )  # fmt: skip
        started.append(process)
        while waiting:
            process.send_signal(waiting.pop())
        status = process.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if received:
        raise Stopped(received[0])
    return status


def end_with(parent: int) -> None:
    """Get SIGTERM when the parent is gone, by a kill too; only Linux can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it went before that was asked for
            os.kill(os.getpid(), signal.SIGTERM)
