"""The tests on the stand-in device, in a process of their own.

A device cannot be unregistered from torch, and libraries choose the one that is registered.
"""

import multiprocessing
import os
from pathlib import Path

import pytest


def run() -> None:
    os.chdir(Path(__file__).parents[1])
    raise SystemExit(pytest.main(["-n", "0", "-W", "ignore", "tests/standin"]))


@pytest.mark.slow
def test_on_the_stand_in_device() -> None:
    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    process.join(600)
    process.kill()
    assert process.exitcode == 0  # what pytest says there stands in the captured output
