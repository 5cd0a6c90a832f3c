"""Settings of the C library's allocator and of the processor."""

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
_STRICT = "2"  # value of overcommit_memory at which reserved memory counts as used
BLOCK = 1 << 29  # bytes, below the size that malloc takes from the system by itself
CACHES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
"""Variables of the environment from which oneDNN, and torch's layer above it, read how many shapes
of products they keep, when they first compute one: 0.3 MB a shape each, of 1,024 by default."""
SHAPES = 256


@cache
def keep_large_blocks() -> None:
    """Reuse the memory of freed tensors, where the C library is glibc, and use huge pages.

    By default glibc takes every block above 32 MB from the system and returns it when freed, and
    the system clears each page again: with a vocabulary of 32,768 that is a third of an update on
    a CPU. Here the process keeps the memory that it once needed.

    An iteration touches far more pages of 4 kB than the processor's address cache holds: with pages
    of 2 MB it takes about an eighth less time. Addresses for half of the machine's memory are
    reserved for them, which uses no memory; none are reserved where the system or a limit on the
    process counts reserved memory. Done once per process, before memory is in use.

    oneDNN keeps at most SHAPES compiled products, unless the user's environment says how many.
    """
    for name in CACHES:
        os.environ.setdefault(name, str(SHAPES))
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
    """Return whether reserved but unused memory counts against a limit."""
    import resource  # not there on Windows

    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return True
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    return not overcommit.exists() or overcommit.read_text().strip() == _STRICT


def _reserve_huge_pages(libc: ctypes.CDLL) -> None:
    """Let malloc grow to half of the machine's memory, advise huge pages there, and free it."""
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
    """Treat numbers below 1e-38 as 0 in this thread, where the processor supports it.

    Decays of linear attention and tails of a softmax reach them, and arithmetic with them is many
    times slower: without this it takes a third of an update of a small Qwen3.5.
    """
    before = bool(torch.tensor(1e-30) * 1e-9 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
