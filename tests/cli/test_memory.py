"""Memory that was freed is used again, and numbers too small to count are 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_rlhf.runs import accelerator as memory


def allows_huge_pages() -> bool:
    """Whether programs that ask get them, and nothing keeps ours from asking."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    allowed = setting.exists() and "[madvise]" in setting.read_text()
    return allowed and not memory._reserving_costs()


PROGRAM = """
import resource, sys, torch
from lightning_rlhf.runs.accelerator import keep_large_blocks
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


HUGE = """
import re, resource, sys, torch
if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, resource.RLIM_INFINITY))
from lightning_rlhf.runs.accelerator import keep_large_blocks

def size(name):
    text = open("/proc/self/status").read() + open("/proc/self/smaps_rollup").read()
    return int(re.search(rf"{name}:\\s+(\\d+) kB", text)[1])

virtual, resident = size("VmSize"), size("VmRSS")
keep_large_blocks()
print(size("VmSize") - virtual, size("VmRSS") - resident)
tensors = [torch.ones(100_000) for _ in range(500)]
print(size("AnonHugePages"))
resident = size("VmRSS")
keep_large_blocks()
print(size("VmRSS") - resident)
"""


def reserved_resident_huge_again(how: str) -> tuple[int, ...]:
    """What asking reserves and takes, huge pages under 500 tensors of 400 kB, and what asking again
    takes; kB."""
    command = [sys.executable, "-c", HUGE, how]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(map(int, found.stdout.split()))


@pytest.mark.skipif(not allows_huge_pages(), reason="the kernel's own setting")
def test_tensors_lie_on_huge_pages() -> None:
    """As many of 195 MB as the kernel has pages for; reserving takes nothing, twice neither."""
    reserved, resident, huge, again = reserved_resident_huge_again("free")
    assert reserved > 500_000
    assert max(resident, again) < 5_000
    assert huge > 0


@pytest.mark.skipif(not allows_huge_pages(), reason="the kernel's own setting")
def test_nothing_is_reserved_under_a_limit_that_counts_it() -> None:
    reserved, _, huge, _ = reserved_resident_huge_again("limited")
    assert (reserved, huge) == (0, 0)


SHAPES = """
import re, torch
from lightning_rlhf.runs import accelerator

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) // 1024

accelerator.SHAPES = 16
accelerator.keep_large_blocks()
torch.set_num_threads(1)
weight = torch.zeros(64, 64)
for rows in range(1, 601):
    torch.ops.mkldnn._linear_pointwise(torch.zeros(rows, 64), weight, None, "none", [], "")
    if rows == 200:
        before = resident()
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("kept", "more"), [({}, (0, 60)), (dict.fromkeys(memory.CACHES, "1024"), (150, 400))]
)
def test_products_of_many_shapes_take_bounded_memory(
    kept: dict[str, str], more: tuple[int, int]
) -> None:
    """400 more shapes take about 220 MB where all are kept, which the user may ask for."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no such operator")
    found = subprocess.run(
        [sys.executable, "-c", SHAPES],
        env=os.environ | kept,
        capture_output=True,
        text=True,
        check=True,
    )
    least, most = more
    assert least <= int(found.stdout) <= most


DENORMALS = """
import torch
from lightning_rlhf.runs.accelerator import denormals_flushed
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
