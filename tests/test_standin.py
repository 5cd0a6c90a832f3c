"""The tests on the stand-in device, in a process of their own.

A device cannot be unregistered from torch, and libraries choose the one that is registered.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_on_the_stand_in_device() -> None:
    tests = Path(__file__).with_name("standin")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-W", "ignore", str(tests)],
        cwd=tests.parent.parent, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
