"""The tests on the stand-in device, in a process of their own.

A device cannot be unregistered from torch, and libraries choose the one that is registered.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(told: Path) -> None:
    """pytest on tests/standin; what it says goes to a file."""
    with told.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(ROOT)
    raise SystemExit(pytest.main(["-n", "0", "-W", "ignore", str(ROOT / "tests" / "standin")]))


@pytest.mark.slow
def test_on_the_stand_in_device(tmp_path: Path) -> None:
    told = tmp_path / "told.txt"
    process = multiprocessing.get_context("fork").Process(target=run, args=(told,), daemon=True)
    process.start()
    process.join(600)
    assert process.exitcode == 0, told.read_text()[-8000:]
