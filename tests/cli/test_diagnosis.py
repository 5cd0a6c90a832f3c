"""What a run of PPO warns of while it goes on."""

from __future__ import annotations

import json
from typing import Any

from .conftest import Workplace, given


def test_a_constant_reward_and_a_large_kl(finished: Workplace) -> None:
    """Between the third iteration and the end; a resume may have another kl_warning."""
    rules = finished.folder / "rules.py"
    rules.write_text("def same(prompts, responses):\n    return [0.1] * len(responses)\n")
    command = (
        "stage=ppo", "run=constant", given(finished)[0], "reward=function",
        f"reward.path={rules}:same", "ppo.iterations=4", "ppo.lr=0.1",
    )  # fmt: skip
    out = finished.mini(*command, "ppo.kl_warning=1e-6").succeeded.out
    same = "warning: all responses of an iteration got the same reward, 3 iterations in a row"
    assert out.count(same) == out.count("warning: kl_divergence is ") == 1
    assert out.index(same) < out.index("ppo 4/4")


def findings(place: Workplace, run: str, *overrides: str) -> list[dict[str, Any]]:
    """Train for a few iterations with a planted fault; return what diagnosis.json holds."""
    start = ("stage=ppo", f"run={run}", *given(place), "ppo.checkpoint_every=100")
    place.mini(*start, *overrides).succeeded  # noqa: B018
    found: list[dict[str, Any]] = json.loads(
        (place.stage("ppo", run) / "diagnosis.json").read_text()
    )
    return found
