"""The line that a run prints at a signal: once, whatever processes it has."""

from __future__ import annotations

import os
import signal

import pytest

from lightning_rlhf.callbacks.stop import Stop
from lightning_rlhf.parallel.world import IN_LAUNCHER, TORCHRUN

NOBODY = 2**22 + 1
"""Larger than the number of any process of Linux."""


@pytest.mark.parametrize(
    ("rank", "launcher", "lines"),
    [
        (None, None, 1),
        (0, None, 1),  # started by the user's torchrun
        (1, None, 0),
        (0, os.getppid(), 0),  # this program has started it, and prints the signal itself
        (0, NOBODY, 1),  # ... and has been killed since
    ],
)
def test_one_process_prints_a_signal(
    rank: int | None,
    launcher: int | None,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if rank is not None:
        for name, value in zip(TORCHRUN, (rank, 2, rank), strict=True):
            monkeypatch.setenv(name, str(value))
    if launcher is not None:
        monkeypatch.setenv(IN_LAUNCHER, str(launcher))
    stop = Stop()
    stop.receive(signal.SIGTERM, None)
    assert stop.signal == signal.SIGTERM
    assert capfd.readouterr().err.count("ending after this step") == lines


def test_a_signal_that_is_repeated_at_once_is_the_first_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Linux sends a process the signal for its parent's end once for each thread of the parent.

    At the first of them the parent may still be there. The process prints the line then at another.
    """
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append(signum))
    monkeypatch.setenv(IN_LAUNCHER, str(os.getppid()))
    before = signal.getsignal(signal.SIGTERM)
    stop = Stop()
    stop.receive(signal.SIGTERM, None)
    monkeypatch.setenv(IN_LAUNCHER, str(NOBODY))
    for _ in range(3):
        stop.receive(signal.SIGTERM, None)
    assert not sent
    assert capfd.readouterr().err.count("ending after this step") == 1
    stop.time -= 1
    try:
        stop.receive(signal.SIGTERM, None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert sent == [signal.SIGTERM]
