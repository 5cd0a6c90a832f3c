"""Time and memory of what runs inside, and that nothing of the limits is left afterwards."""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import threading

import pytest
import torch

from lightning_rlhf.core.device_memory import total_memory
from lightning_rlhf.io.bounded import bounded

GIB = 1 << 30
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is on Linux alone")


def left() -> tuple[object, ...]:
    """What the limits change of the process."""
    return (
        signal.getsignal(signal.SIGPROF),
        signal.getitimer(signal.ITIMER_PROF),
        resource.getrlimit(resource.RLIMIT_AS),
    )


def spin() -> None:
    while True:
        pass


def test_time() -> None:
    before = left()
    with pytest.raises(TimeoutError, match=r"more than 0\.05 s"), bounded(0.05, GIB):
        spin()
    assert left() == before


def test_time_of_code_that_catches_every_exception() -> None:
    """As Jinja's compiler does where it computes constants."""

    def work() -> None:
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with pytest.raises(TimeoutError), bounded(0.05, GIB):
        work()


@LINUX
def test_memory() -> None:
    before = left()
    with pytest.raises(MemoryError), bounded(5.0, GIB):
        bytearray(total_memory(torch.device("cpu")))
    assert left() == before
    assert len(bytearray(GIB // 4)) == GIB // 4


@LINUX
def test_a_lower_limit_of_the_user_stays() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    own = 1 << 45 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_AS, (own, hard))
    try:
        with bounded(5.0, 1 << 50):
            assert resource.getrlimit(resource.RLIMIT_AS)[0] == own
        assert resource.getrlimit(resource.RLIMIT_AS) == (own, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_an_error_inside_comes_through() -> None:
    before = left()
    with pytest.raises(KeyError), bounded(5.0, GIB):
        raise KeyError
    assert left() == before


def test_another_thread_is_not_limited() -> None:
    found = []

    def work() -> None:
        with bounded(5.0, GIB):
            found.append(left())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [left()]
