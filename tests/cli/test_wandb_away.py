"""W&B's own process is killed in a run; tests/callbacks/test_wandb_away.py tries the other ways."""

from __future__ import annotations

import sys

import pytest

from .conftest import Workplace, rows, weights

KILLS = """
import os
import signal
from pathlib import Path

calls = 0


def reward(prompts, responses):
    global calls
    calls += 1
    for path in Path("/proc").glob("[0-9]*/stat"):
        pid, name, _, parent = path.read_text().split()[:4]
        if calls == 3 and name == "(wandb-core)" and int(parent) == os.getpid():
            os.kill(int(pid), signal.SIGKILL)
    return [-len(text) / 10 for text in responses]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
def test_the_command_ends_as_it_would_without_wandb(workplace: Workplace) -> None:
    """Calls of the reward: the evaluation at the start, then an iteration each."""
    (workplace.folder / "kills.py").write_text(KILLS)
    path = workplace.folder / "kills.py"
    command = [
        "stage=ppo",
        "policy.checkpoint=base",
        "reward=function",
        f"reward.path={path}:reward",
    ]
    workplace.mini(*command, "run=without").succeeded  # noqa: B018
    other = workplace.folder / "again.py"  # a module of its own, whose calls start at 0
    other.write_text(KILLS)
    command[-1] = f"reward.path={other}:reward"
    outcome = workplace.mini(*command, "run=with", "logger=wandb").succeeded
    assert outcome.out.count("W&B: its process has ended; the run goes on without it") == 1
    assert "Traceback" not in outcome.out + outcome.err
    without, with_it = (workplace.stage("ppo", run) for run in ("without", "with"))
    assert rows(with_it) == rows(without)
    assert weights(with_it) == weights(without) != {}
