"""Runs with a planted fault report it, and report it first."""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from lightning_rlhf.callbacks.diagnosis import DIAGNOSIS, Diagnosis, History
from lightning_rlhf.callbacks.evaluation import Evaluation
from lightning_rlhf.callbacks.metrics import PPOMetrics
from lightning_rlhf.core.records import DecodedResponses

from .conftest import VOCABULARY, fit, prompts
from .experiences import Make

HEALTHY: dict[str, Any] = {
    "max_response_tokens": 12, "missing_eos": "none", "minibatch_size": 8, "microbatch_size": 8,
    "kl_warning": 5.0,
}  # fmt: skip


def same(decoded: DecodedResponses) -> list[float]:
    """Return the same score for every response."""
    return [0.0] * len(decoded)


CASES = [
    ("reward_constant", 3, {"reward": same}),
    ("groups_alike", 3, {"reward": same, "advantage": "grpo", "samples_per_prompt": 4}),
    ("kl_exploding", 2, {"lr": 1.0}),
    ("entropy_collapse", 3, {"temperature": 0.002}),
    ("responses_repeat", 5, {"temperature": 0.02}),
]


@pytest.mark.parametrize(("rule", "iterations", "fault"), CASES)
def test_a_planted_fault_is_the_first_finding(
    make_ppo: Make, tmp_path: Path, rule: str, iterations: int, fault: dict[str, Any]
) -> None:
    module = make_ppo(fresh=True, **{**HEALTHY, "iterations": iterations, **fault})
    diagnosis = Diagnosis(History(module.config, tmp_path))
    batches = [prompts(module.config.prompts_per_iteration, seed=k) for k in range(iterations)]
    fit(module, batches, [PPOMetrics(), diagnosis])
    findings = json.loads((tmp_path / DIAGNOSIS).read_text())
    assert findings[0]["rule"] == rule, findings


def low(response: str) -> float:
    """Return the share of the tokens of a response that are in the lower half of the vocabulary."""
    return fmean(int(token) < VOCABULARY / 2 for token in re.findall(r"\d+", response))


def test_a_reward_that_pays_for_the_opposite_of_gold_is_the_first_finding(
    make_ppo: Make, tmp_path: Path
) -> None:
    """The reward is for low tokens, and the judge's score for high ones."""
    module = make_ppo(
        fresh=True, reward=lambda decoded: [low(x) for x in decoded.responses],
        **{**HEALTHY, "iterations": 8, "rollout_batch_size": 32, "lr": 0.005},
    )  # fmt: skip
    evaluation = Evaluation(lambda row, response, ended: {"gold": 1 - low(response)}, tmp_path)
    diagnosis = Diagnosis(History(module.config, tmp_path))
    batches = [prompts(module.config.prompts_per_iteration, seed=k) for k in range(8)]
    fit(
        module, batches, [PPOMetrics(), evaluation, diagnosis],
        held_out=[prompts(32, seed=100)], every=4,
    )  # fmt: skip
    findings = json.loads((tmp_path / DIAGNOSIS).read_text())
    assert findings[0]["rule"] == "reward_against_gold", findings
