"""Memory that was freed is used again, and numbers too small to count are 0."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lightning_rlhf.runs import accelerator as memory

PROGRAM = """
import re, resource, sys, torch
from lightning_rlhf.runs import accelerator

def size(name):
    text = open("/proc/self/status").read()
    return int(re.search(rf"{name}:\\s+(\\d+) kB", text)[1])

accelerator.SHAPES = 16
if sys.argv[1] != "plain":
    accelerator.keep_large_blocks()
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
"""Prints page faults of 10 tensors of 64 MB, each of 15,625 pages of 4 kB; kB that 400 more shapes
of products take."""


def measured(how: str) -> tuple[int, ...]:
    command = [sys.executable, "-c", PROGRAM, how]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(map(int, found.stdout.split()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own settings")
def test_freed_memory_and_products_of_many_shapes() -> None:
    """Where all products are kept 400 shapes take about 220 MB."""
    plain, _ = measured("plain")
    faults, shapes = measured("kept")
    if plain > 150_000:  # a C library that keeps its memory by itself has nothing to show
        assert faults < plain / 5
    assert shapes < 60_000


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
