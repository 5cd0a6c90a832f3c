"""What the process asks of the C library and the processor."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_HUGE_PAGES = 14  # Linux's MADV_HUGEPAGE
_STRICT = "2"  # of overcommit_memory: what is reserved counts as if it were used
BLOCK = 1 << 29  # bytes, below the size that malloc takes from the system by itself


@cache
def keep_large_blocks() -> None:
    """Let freed tensors be used again, where the C library is glibc, and lie on huge pages.

    By itself it takes every block above 32 MB from the system and gives it back, and the system
    clears each page of it anew: with a vocabulary of 32,768 that is a third of an update on a CPU.
    The process keeps what it once needed.

    An iteration goes through far more pages of 4 kB than a processor can find quickly: on pages
    of 2 MB it takes about an eighth less time. Half of the machine's memory is reserved for them,
    which takes none of it; nothing is where the system or a limit on the process counts that. Once
    a process: what is in use by then would be in the way.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return
    mallopt(_TRIM_THRESHOLD, -1)
    if mallopt(_MMAP_THRESHOLD, 1 << 30):
        if not _reserving_costs():
            _reserve_huge_pages(libc)
    else:
        mallopt(_MMAP_THRESHOLD, 1 << 25)  # older releases take no more


def _reserving_costs() -> bool:
    """Whether memory that is reserved, but not used, counts against anything."""
    import resource  # not there on Windows

    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return True
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    return not overcommit.exists() or overcommit.read_text().strip() == _STRICT


def _reserve_huge_pages(libc: ctypes.CDLL) -> None:
    """Let malloc grow over half of the machine's memory, advise huge pages there, and free it."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = mmap.PAGESIZE
    half = os.sysconf("SC_PHYS_PAGES") * page // 2
    blocks = [libc.malloc(BLOCK) for _ in range(half // BLOCK)]
    for block in blocks:
        if block:
            start = -(-block // page) * page
            libc.madvise(start, BLOCK - page, _HUGE_PAGES)
            libc.free(block)


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
