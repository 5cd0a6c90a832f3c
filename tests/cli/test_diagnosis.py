"""What a run of PPO warns of while it goes on."""

from __future__ import annotations

import json
from typing import Any

from .conftest import Workplace, given


def findings(place: Workplace, run: str, *overrides: str) -> list[dict[str, Any]]:
    """Train for a few iterations with a planted fault; return what diagnosis.json holds."""
    start = ("stage=ppo", f"run={run}", *given(place), "ppo.checkpoint_every=100")
    place.mini(*start, *overrides).succeeded  # noqa: B018
    found: list[dict[str, Any]] = json.loads(
        (place.stage("ppo", run) / "diagnosis.json").read_text()
    )
    return found


def test_planted_faults_are_the_first_findings(finished: Workplace) -> None:
    prompts = finished.folder / "data" / "prompts_train.jsonl"
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    for row in rows[:4]:  # a quarter
        row["prompt"] = "Please tell me. " * 40 + row["prompt"]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cut = findings(finished, "cut", "ppo.iterations=1", "data.long_prompts=cut")
    assert [(f["rule"], f["iteration"]) for f in cut] == [("prompts_cut", 0)]
    assert "longer than data.max_prompt_tokens (25%)" in cut[0]["symptom"]
    endless = findings(finished, "endless", "data.prompts.train=data/prompts_val.jsonl")
    assert [f["rule"] for f in endless] == ["nothing_ends", "length_extreme"]
