"""What the process asks of the C library and the processor."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def keep_large_blocks() -> None:
    """Let freed tensors be used again, where the C library is glibc.

    By itself it takes every block above 32 MB from the system and gives it back, and the system
    clears each page of it anew: with a vocabulary of 32,768 that is a third of an update on a CPU.
    The process keeps what it once needed.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for largest in (1 << 30, 1 << 25):  # older releases take no more than 32 MB
            if mallopt(_MMAP_THRESHOLD, largest):
                break
        mallopt(_TRIM_THRESHOLD, 1 << 30)


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Inside, numbers below 1e-38 are 0 in this thread, where the processor can do it.

    Decays of linear attention and tails of a softmax reach them, and a processor computes with them
    many times as slowly: without this a third of an update of a small Qwen3.5.
    """
    before = bool(torch.tensor(1e-30) * 1e-9 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
