"""Memory that was freed is used again, and numbers too small to count are 0."""

import subprocess
import sys

import pytest
import torch

from lightning_rlhf.runs import accelerator as memory

PROGRAM = """
import re, resource, sys, torch
from unittest.mock import MagicMock
for name in ("lightning.fabric.plugins.environments", "lightning.pytorch.strategies"):
    sys.modules[name] = MagicMock()  # seconds of imports
from lightning_rlhf.runs import accelerator

def size(name):
    text = open("/proc/self/status").read()
    return int(re.search(rf"{name}:\\s+(\\d+) kB", text)[1])

def faults():
    for i in range(13):
        torch.zeros(16_000_000).add_(1)
        if i == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
print(faults())
accelerator.SHAPES = 16
accelerator.keep_large_blocks()
print(faults())
weight, before = torch.zeros(64, 64), 0
for rows in range(1, 301) if hasattr(torch.ops.mkldnn, "_linear_pointwise") else ():
    torch.ops.mkldnn._linear_pointwise(torch.zeros(rows, 64), weight, None, "none", [], "")
    if rows == 100:
        before = size("VmRSS")
print(size("VmRSS") - before if before else 0)
"""
"""Prints page faults of 10 tensors of 64 MB, each of 15,625 pages of 4 kB, before and after the
settings are made; kB that 200 more shapes of products take."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own settings")
def test_freed_memory_and_products_of_many_shapes() -> None:
    """Where all products are kept 200 shapes take about 110 MB."""
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    plain, faults, shapes = map(int, found.stdout.split())
    if plain > 150_000:  # a C library that keeps its memory by itself has nothing to show
        assert faults < plain / 5
    assert shapes < 30_000


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
