"""Each rule on both sides of its thresholds, on histories made by hand.

Every case is given to all rules: the names of those that find something, in their order.
"""

import csv
import math
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.callbacks.diagnosis import RULES, History, rules_of
from lightning_rlhf.callbacks.files import eval_samples, write_samples
from lightning_rlhf.core.metrics import METRICS
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.config import DataConfig

DOCS = Path(__file__).parents[2] / "docs" / "diagnosis.md"
RECORDED = Path(__file__).parent / "recorded_rows.csv"
CONFIG = {
    "kl_warning": 50.0, "max_response_tokens": 100, "rollout_batch_size": 64,
    "prompts_per_iteration": 64, "critic_warmup": 0, "advantage": "gae", "has_critic": True,
    "lr": 1e-3, "clip_range": 0.2, "ppo_epochs": 4,
}  # fmt: skip
HEALTHY = {
    "reward_mean": 0.0, "kl_divergence": 1.0, "entropy": 1.0, "rollout/reward_std": 1.0,
    "rollout/reward_min": -2.0, "rollout/reward_max": 2.0, "rollout/kl_std": 0.8,
    "rollout/response_tokens": 40.0, "rollout/ended": 1.0, "rollout/most_common": 0.02,
    "rollout/repetition": 0.01, "rollout/explained_variance": 0.3, "rollout/groups_alike": 0.2,
    "update/value_loss": 1.0, "update/clip_fraction": 0.1, "update/ratio_max": 1.5,
    "update/steps": 8.0, "update/lr": 1e-3,
}  # fmt: skip


def history_of(rows: Any, evaluations: Any = (), **changes: Any) -> History:
    """Return a history with the configuration CONFIG; changes: of it, and of the other fields."""
    facts = {name: changes.pop(name) for name in ("prompts_cut", "run_dir") if name in changes}
    config: Any = SimpleNamespace(**CONFIG | changes)
    given: Any = {"prompts_cut": 0.0, "run_dir": Path("nowhere")} | facts
    return History(rows=rows, evaluations=evaluations, config=config, **given)


def found(
    columns: dict[str, list[float]] | None = None, *,
    evaluations: list[dict[str, float]] | None = None, start: int = 1, **changes: Any,
) -> list[str]:  # fmt: skip
    """Return the names of the rules that apply to healthy iterations with other `columns`."""
    columns = columns or {}
    rows = [
        HEALTHY | {"step": float(start + i)} | dict(zip(columns, values, strict=True))
        for i, values in enumerate(zip(*columns.values(), strict=True))
    ]
    evaluated = [{"step": float(k), **row} for k, row in enumerate(evaluations or [])]
    history = history_of(rows, evaluated, **changes)
    return [rule.name for rule in RULES if rule.find(history) is not None]


def test_a_rule_whose_function_has_another_name_is_found_at_once() -> None:
    with pytest.raises(ValueError, match=r"ppo\.kl_warning"):
        rules_of("kl_explodes | kl_divergence > ppo.kl_warning | cause | remedy", {})


def test_nothing_is_concluded_from_metrics_that_are_not_there() -> None:
    for count in (1, 100):
        rows = [{"step": float(i)} for i in range(5, count)]
        history = history_of(rows, [{"step": 0.0}] * 3)
        assert [rule.name for rule in RULES if rule.find(history) is not None] == []


def noisy(size: float, count: int) -> dict[str, list[float]]:
    return {"reward_mean": [size if i % 2 else -size for i in range(count)]}


CLIPPED, TOKENS = "update/clip_fraction", "rollout/response_tokens"
EXPLAINED, LOSS = "rollout/explained_variance", "update/value_loss"
LOW, HIGH = "rollout/reward_min", "rollout/reward_max"
CASES: list[tuple[str, dict[str, list[float]], dict[str, Any], bool]] = [
    # rule, columns that are not healthy, keys, whether the rule alone applies
    ("prompts_cut", {}, {"prompts_cut": 0.11}, True),
    ("prompts_cut", {}, {"prompts_cut": 0.1}, False),
    ("groups_alike", {"rollout/groups_alike": [0.9, 0.95, 1.0]}, {"advantage": "grpo"}, True),
    ("groups_alike", {"rollout/groups_alike": [0.89, 0.95, 1.0]}, {"advantage": "grpo"}, False),
    ("compares none", {"rollout/groups_alike": [1.0] * 3}, {"advantage": "reinforce++"}, False),
    ("nothing_ends", {"rollout/ended": [0.0, 0.04, 0.049]}, {}, True),
    ("nothing_ends", {"rollout/ended": [0.0, 0.0, 0.05]}, {}, False),
    ("length_extreme", {TOKENS: [95.0, 96.0, 100.0]}, {}, True),
    ("length_extreme", {TOKENS: [94.9, 96.0, 100.0]}, {}, False),
    ("length_extreme", {TOKENS: [1.5, 1.0, 1.2]}, {}, True),
    ("length_extreme", {TOKENS: [1.6, 1.0, 1.2]}, {}, False),
    # The standard error of 3 * 64 responses is 0.8 / sqrt(192) = 0.0577, times 4 is 0.231.
    ("kl_negative", {"kl_divergence": [-0.24] * 3}, {}, True),
    ("kl_negative", {"kl_divergence": [-0.22] * 3}, {}, False),
    ("kl_negative", {"kl_divergence": [-0.011] * 3, "rollout/kl_std": [0.0] * 3}, {}, True),
    ("rounding", {"kl_divergence": [-0.009] * 3, "rollout/kl_std": [0.0] * 3}, {}, False),
    ("kl_exploding", {"kl_divergence": [50.1]}, {}, True),
    ("kl_exploding", {"kl_divergence": [50.0]}, {}, False),
    ("kl_exploding", {"kl_divergence": [1e9]}, {"kl_warning": None}, False),
    ("entropy_collapse", {"entropy": [0.009] * 3}, {}, True),
    ("entropy_collapse", {"entropy": [0.01, 0.0, 0.0]}, {}, False),
    ("ratio_outliers", {"update/ratio_max": [10.1, 11.0, 99.0]}, {}, True),
    ("ratio_outliers", {"update/ratio_max": [10.0, 99.0, 99.0]}, {}, False),
    ("clip_fraction_high", {CLIPPED: [0.3, 0.3, 0.45, 0.5, 0.5]}, {}, True),  # mean 0.41
    ("clip_fraction_high", {CLIPPED: [0.3, 0.3, 0.4, 0.45, 0.5]}, {}, False),  # mean 0.39
    ("clip_fraction_zero", {CLIPPED: [0.0] * 10}, {}, True),
    ("clip_fraction_zero", {CLIPPED: [1e-4] + [0.0] * 9}, {}, False),
    ("ratio is 1", {CLIPPED: [0.0] * 10, "update/steps": [1.0] * 10}, {}, False),
    ("schedule ends", {CLIPPED: [0.0] * 10, "update/lr": [1e-3] * 9 + [4e-4]}, {}, False),
    ("warm-up", {CLIPPED: [0.0] * 10}, {"critic_warmup": 1}, False),
    # 10 iterations of 10 responses in 4 epochs: 400 times 7.5 are 3,000 tokens.
    ("clip_fraction_zero", {CLIPPED: [0.0] * 10, TOKENS: [7.5] * 10}, {"rollout_batch_size": 10},
     True),
    ("few tokens", {CLIPPED: [0.0] * 10, TOKENS: [7.4] * 10}, {"rollout_batch_size": 10}, False),
    ("responses_identical", {"rollout/most_common": [0.5, 0.6, 0.7]}, {}, True),
    ("responses_identical", {"rollout/most_common": [0.49, 0.6, 0.7]}, {}, False),
    ("few prompts", {"rollout/most_common": [1.0] * 3}, {"prompts_per_iteration": 3}, False),
    ("responses_repeat", {"rollout/repetition": [0.31] * 3}, {}, True),
    ("responses_repeat", {"rollout/repetition": [0.3, 0.9, 0.9]}, {}, False),
    ("reward_constant", {LOW: [0.5] * 3, HIGH: [0.5] * 3}, {}, True),
    ("reward_constant", {LOW: [0.5] * 3, HIGH: [1.5, 0.5, 0.5]}, {}, False),
    ("reward_constant", {"rollout/reward_paid_range": [0.0] * 3}, {}, True),
    ("of one", {"rollout/reward_paid_range": [0.0] * 3}, {"rollout_batch_size": 1}, False),
    ("critic_worse", {EXPLAINED: [-0.11] * 20}, {}, True),
    ("critic_worse", {EXPLAINED: [-0.09] * 20}, {}, False),
    ("critic_worse", {EXPLAINED: [-0.11] * 19 + [math.nan]}, {}, False),
    # Mean -0.125; standard errors 1.125 * sqrt(20 / 19) / sqrt(20) = 0.26, and 0.023.
    ("critic_worse", {EXPLAINED: [1.0, -1.25] * 10}, {}, False),
    ("critic_worse", {EXPLAINED: [-0.025, -0.225] * 10}, {}, True),
    ("value_loss_rising", {LOSS: [1.0] * 10 + [3.1] * 10}, {}, True),
    ("value_loss_rising", {LOSS: [1.0] * 10 + [2.9] * 10}, {}, False),
    ("value_loss_rising", {LOSS: [1.0] * 10 + [3.1] * 9 + [0.9]}, {}, False),
    ("without a critic", {LOSS: [1.0] * 10 + [3.1] * 10}, {"has_critic": False}, False),
    # Thirds of 14 with deviation 0.052: standard error of the gain 0.0196, twice is 0.039.
    ("reward_flat", noisy(0.05, 42), {}, True),
    ("reward_flat", noisy(0.05, 39), {}, False),
    ("first not kept", noisy(0.05, 42), {"start": 2}, False),
    ("reward_flat", noisy(0.05, 42), {"start": 6, "critic_warmup": 5}, True),
    # Deviation 0.156: twice the standard error is 0.118 of thirds of 14, 0.075 of those of 33.
    ("reward_flat", noisy(0.15, 42), {}, False),
    ("reward_flat", noisy(0.15, 99), {}, True),
    # Gains of 0.14 and 0.056 standard deviations, the latter with an error of 0.003.
    ("reward_flat", {"reward_mean": [i * 0.005 for i in range(42)]}, {}, False),
    ("reward_flat", {"reward_mean": [i * 0.002 for i in range(42)]}, {}, True),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "columns", "keys", "applies"), CASES)
def test_a_rule_applies_beyond_its_threshold_alone(
    rule: str, columns: dict[str, list[float]], keys: dict[str, Any], applies: bool
) -> None:
    assert found(columns, **keys) == [rule] * applies


@pytest.mark.parametrize(
    ("rewards", "golds", "noise", "applies"),
    [
        ([0.0, 1.0, 2.0], [0.5, 0.4, 0.3], 0.0, True),
        ([0.0, 1.0, 0.9], [0.5, 0.4, 0.3], 0.0, False),
        ([0.0, 1.0, 2.0], [0.5, 0.4, 0.45], 0.0, False),
        ([0.0, 1.0], [0.5, 0.3], 0.0, False),
        ([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 0.95, 0.89], 0.0, True),
        ([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 0.95, 0.91], 0.0, False),  # 0.09 of a range of 1
        # 0.2 less, of four prompts 0.2 +- noise: a standard error of 2 * noise / sqrt(12).
        ([0.0, 1.0, 2.0], [0.5, 0.4, 0.3], 0.17, True),  # 2 errors are 0.196
        ([0.0, 1.0, 2.0], [0.5, 0.4, 0.3], 0.18, False),  # ... and 0.208
        ([0.0, 1.0, 2.0], [0.5, 0.4, 0.3], None, False),  # no samples to tell
    ],
)
def test_reward_against_gold(
    tmp_path: Path, rewards: list[float], golds: list[float], noise: float | None, applies: bool
) -> None:
    rows = [
        {"eval/reward_mean": reward, "eval/judge/gold": gold}
        for reward, gold in zip(rewards, golds, strict=True)
    ]
    for step, gold in enumerate(golds if noise is not None else ()):
        last = noise if step == len(golds) - 1 else 0.0
        # The second of five prompts has no verdict, as where a part does not apply.
        scores = [gold + last, None, gold + last, gold - last, gold - last]
        samples = [{"index": i, "judge": {"gold": x}} for i, x in enumerate(scores)]
        write_samples(eval_samples(tmp_path, step), samples)
    assert found(evaluations=rows, run_dir=tmp_path) == ["reward_against_gold"] * applies


def test_reward_against_perplexity() -> None:
    first = {"eval/reward_mean": 0.0, "eval/response_perplexity": 5.0}
    for reward, perplexity, applies in ((1.0, 51.0, 1), (1.0, 50.0, 0), (0.0, 51.0, 0)):
        last = {"eval/reward_mean": reward, "eval/response_perplexity": perplexity}
        assert found(evaluations=[first, last]) == ["reward_against_perplexity"] * applies


def test_names_keys_and_metrics_of_the_rules_exist() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert HEALTHY.keys() <= METRICS.keys()
    keys = {f"ppo.{f.name}" for f in fields(PPOConfig)} | {
        f"data.{f.name}" for f in fields(DataConfig)
    }
    for rule in RULES:
        text = f"{rule.when} {rule.cause} {rule.remedy}"
        assert set(re.findall(r"\b(?:ppo|data)\.\w+", text)) <= keys, rule.name
        known = (*METRICS, "eval/judge/gold")
        for metric in re.findall(r"\b(?:rollout|update|eval)/\w+(?:/\w+)?", text):
            assert metric in known, (rule.name, metric)
        assert not text.endswith(".")


def test_a_recorded_run_of_the_quickstart_has_no_finding() -> None:
    """One of the runs of benchmarks/results/diagnosis_clean.md, after every iteration."""
    with RECORDED.open(newline="") as file:
        rows = [{n: float(x) for n, x in row.items() if x} for row in csv.DictReader(file)]
    assert len(rows) == 61
    for end in range(1, 62):
        trained = [row for row in rows[:end] if "reward_mean" in row]
        evaluated = [row for row in rows[:end] if "eval/reward_mean" in row]
        history = history_of(trained, evaluated, max_response_tokens=48)
        assert [rule.name for rule in RULES if rule.find(history) is not None] == []


def test_the_table_in_the_docs_is_that_of_the_code() -> None:
    text = DOCS.read_text()
    table = text.split("<!-- rules table: begin -->")[1].split("<!-- rules table: end -->")[0]
    lines = ["| rule | applies when | likely cause | what to do |", "|---|---|---|---|"]
    lines += [f"| `{r.name}` | {r.when} | {r.cause} | {r.remedy} |" for r in RULES]
    assert table.strip().splitlines() == lines
