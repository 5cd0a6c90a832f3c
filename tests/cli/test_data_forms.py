"""Data in another form, trained on as a user would."""

from __future__ import annotations

import json

from lightning_rlhf.runs.folders import CONFIG

from .conftest import Workplace

DIALOGUES = [
    {
        "conversations": [
            {"from": "human", "value": f"What is {i}?"},
            {"from": "gpt", "value": f"It is {i}."},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "Yes."},
            {"from": "human", "value": "Good."},
        ]
    }
    for i in range(24)
]


def test_sft_on_every_turn_of_a_json_array(workplace: Workplace) -> None:
    """A file whose dialogues end on a human turn; its rows are checked before the first update."""
    (workplace.folder / "data" / "mine.json").write_text(json.dumps(DIALOGUES, indent=1))
    command = ["stage=sft", "data=sharegpt", "data.train_on=all", "preflight=strict"]
    outcome = workplace.mini(*command, "data.demonstrations.train=data/mine.json").succeeded
    assert "23 demonstrations" in outcome.out
    config = json.loads((workplace.stage("sft") / CONFIG).read_text())
    assert (config["data"]["format"], config["data"]["train_on"]) == ("sharegpt", "all")
    assert (workplace.stage("sft") / "final").is_dir()
