"""Memory that was freed is used again, and numbers too small to count are 0."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from lightning_rlhf.cli.memory import keep_large_blocks
if sys.argv[1] == "kept":
    keep_large_blocks()
torch.set_num_threads(1)
for _ in range(3):
    torch.zeros(16_000_000).add_(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.zeros(16_000_000).add_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    """Of 20 tensors of 64 MB, one after another; each is 15,625 pages of 4 kB."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    return int(found.stdout.split()[-1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own setting")
def test_a_tensor_takes_the_place_of_the_one_that_was_freed() -> None:
    plain, kept = page_faults("plain"), page_faults("kept")
    if plain > 300_000:  # a C library that keeps its memory by itself has nothing to show
        assert kept < plain / 5


DENORMALS = """
import torch
from lightning_rlhf.cli.memory import denormals_flushed
x = torch.full((64,), 1e-39)
assert (x * 0.5 > 0).all()
with denormals_flushed():
    assert (x * 0.5 == 0).all()
    assert (torch.full((64,), 1e-37) * 0.5 > 0).all()
    with denormals_flushed():
        pass
    assert (x * 0.5 == 0).all()
assert (x * 0.5 > 0).all()
"""


def test_what_is_below_the_smallest_normal_number_is_0_inside_and_not_behind() -> None:
    subprocess.run([sys.executable, "-c", DENORMALS], check=True)
