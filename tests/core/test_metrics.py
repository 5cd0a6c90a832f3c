from __future__ import annotations

from dataclasses import fields

import pytest

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.metrics import METRICS, Goal, check_names, metric_rows, require_metrics
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


@pytest.mark.parametrize(
    ("measured", "named"), [(["eval/b", "eval/a", "kl"], "eval/a, eval/b$"), ([], "no metric was")]
)
def test_a_goal_that_was_not_measured_is_named_with_what_was(
    measured: list[str], named: str
) -> None:
    goal: Goal = [("eval/loss", "min"), ("eval/x", "max")]
    require_metrics("sft.best.metric", goal, {"eval/loss": 1.0, "eval/x": 2.0})
    with pytest.raises(ConfigError, match=f"sft.best.metric.*eval/loss.*{named}"):
        require_metrics("sft.best.metric", goal, dict.fromkeys(measured, 1.0))
