"""Memory that was freed is used again."""

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
