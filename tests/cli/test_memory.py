"""Memory that was freed is used again, and numbers too small to count are 0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_rlhf.runs import accelerator as memory

PROGRAM = """
import re, resource, sys, torch
from lightning_rlhf.runs import accelerator

def size(name):
    text = open("/proc/self/status").read() + open("/proc/self/smaps_rollup").read()
    return int(re.search(rf"{name}:\\s+(\\d+) kB", text)[1])

accelerator.SHAPES = 16
if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, resource.RLIM_INFINITY))
virtual, resident = size("VmSize"), size("VmRSS")
if sys.argv[1] != "plain":
    accelerator.keep_large_blocks()
print(size("VmSize") - virtual, size("VmRSS") - resident)
tensors = [torch.ones(100_000) for _ in range(500)]
print(size("AnonHugePages"))
torch.set_num_threads(1)
for i in range(13):
    torch.zeros(16_000_000).add_(1)
    if i == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
weight, before = torch.zeros(64, 64), 0
for rows in range(1, 601) if hasattr(torch.ops.mkldnn, "_linear_pointwise") else ():
    torch.ops.mkldnn._linear_pointwise(torch.zeros(rows, 64), weight, None, "none", [], "")
    if rows == 200:
        before = size("VmRSS")
print(size("VmRSS") - before if before else 0)
"""
"""Prints kB reserved and taken by asking; kB on huge pages of 500 tensors of 400 kB; page faults of
10 tensors of 64 MB, each of 15,625 pages of 4 kB; kB that 400 more shapes of products take."""


def measured(how: str) -> tuple[int, ...]:
    command = [sys.executable, "-c", PROGRAM, how]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(map(int, found.stdout.split()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own settings")
def test_freed_memory_huge_pages_and_products_of_many_shapes() -> None:
    """Where all products are kept 400 shapes take about 220 MB; reserving takes no memory."""
    *_, plain, _ = measured("plain")
    reserved, resident, huge, faults, shapes = measured("kept")
    if plain > 150_000:  # a C library that keeps its memory by itself has nothing to show
        assert faults < plain / 5
    assert shapes < 60_000
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if setting.exists() and "[madvise]" in setting.read_text() and not memory._reserving_costs():
        assert reserved > 500_000
        assert resident < 5_000
        assert huge > 0
        reserved, _, huge, *_ = measured("limited")
        assert (reserved, huge) == (0, 0)


def test_what_is_below_the_smallest_normal_number_is_0_inside_and_not_behind() -> None:
    x = torch.full((64,), 1e-39)
    assert (x * 0.5 > 0).all()
    with memory.denormals_flushed():
        assert (x * 0.5 == 0).all()
        assert (torch.full((64,), 1e-37) * 0.5 > 0).all()
        with memory.denormals_flushed():
            pass
        assert (x * 0.5 == 0).all()
    assert (x * 0.5 > 0).all()
