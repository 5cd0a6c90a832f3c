"""What is said of two configurations that differ."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_rlhf.runs.folders import changes
from lightning_rlhf.runs.stage import find_stage


def test_each_key_with_its_value_then_and_now(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"stage": "sft", "sft": {"lr": 0.1}, "model": {"name": "a"}}))
    now = {"stage": "sft", "sft": {"lr": 0.2}, "policy": {"name": "b"}, "model": {"name": "a"}}
    assert changes(find_stage(now["stage"]), now, file) == [
        'policy.name was not there, is "b"',
        "sft.lr was 0.1, is 0.2",
    ]


def test_whether_an_unfit_reward_is_refused_makes_no_other_run(tmp_path: Path) -> None:
    part = {"kind": "head", "weight": 1.0}
    then = {"stage": "ppo", "reward": {"kind": "sum", "components": {"a": part, "unfit": part}}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(then))
    now = json.loads(file.read_text())
    for component in now["reward"]["components"].values():
        component["unfit"] = "warn"
    assert changes(find_stage(now["stage"]), now, file) == []
    now["reward"]["components"]["unfit"]["weight"] = 2.0
    assert changes(find_stage(now["stage"]), now, file) == [
        "reward.components.unfit.weight was 1.0, is 2.0"
    ]
