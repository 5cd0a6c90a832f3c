from __future__ import annotations

from dataclasses import fields

import pytest

from lightning_rlhf.core.metrics import METRICS, check_names, metric_rows
from lightning_rlhf.core.records import UpdateStats


def test_every_fact_of_an_update_has_a_row() -> None:
    """Under its own name, or under that of a headline or a count."""
    named = {"loss": "ppo_loss", "entropy": "entropy"}
    for field in fields(UpdateStats):
        metric = METRICS[named.get(field.name, f"update/{field.name}")]
        assert (metric.phase, "ppo" in metric.stages) == ("update", True)
    assert "ppo" in METRICS["update/steps"].stages


def test_a_name_without_a_row_is_refused_by_name() -> None:
    check_names(["reward_mean", "eval/judge/anything"])
    with pytest.raises(ValueError, match="rollout/rewardmean"):
        check_names(["reward_mean", "rollout/rewardmean"])


def test_a_row_is_read_with_its_parts_and_without_those_that_it_lacks() -> None:
    found = metric_rows("""
eval/x | ppo dpo | nats | min | 0.5.. | the x of held-out pairs: a formula
    of two lines: x = y
    -> falls
time/y | sft | s: seconds
""")
    assert vars(found["eval/x"]) == {
        "formula": "a formula of two lines: x = y", "unit": "nats", "phase": "eval",
        "stages": ("ppo", "dpo"), "healthy": "falls", "label": "the x of held-out pairs",
        "better": "min", "band": (0.5, None),
    }  # fmt: skip
    y = found["time/y"]
    assert (y.healthy, y.label, y.better, y.band) == ("-", None, None, None)
