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


def test_a_band_repeats_numbers_of_the_text_on_the_healthy_range() -> None:
    """1 +- 0.01 and log 2 are written as words; "positive" is 0."""
    said = {"update/ratio_mean": "within 0.01 of 1", "eval/reward_margin": "positive"}
    banded = {name: metric for name, metric in METRICS.items() if metric.band is not None}
    assert {"update/clip_fraction", "update/approx_kl", "eval/accuracy"} <= banded.keys()
    for name, metric in banded.items():
        assert metric.band is not None
        if name in said:
            assert metric.healthy == said[name]
            continue
        ends = [f"{end:g}" for end in metric.band if end is not None]
        assert ends
        assert all(end in metric.healthy for end in ends), name
