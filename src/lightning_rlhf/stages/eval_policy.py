"""stage=eval_policy: policies against each other and against the SFT model, on held-out prompts."""

from __future__ import annotations

from pathlib import Path

from lightning_rlhf.core.config import PolicyEvalConfig
from lightning_rlhf.core.metrics import HELD_OUT
from lightning_rlhf.stages.policies import check_policies, policy_folders
from lightning_rlhf.stages.stage import Settings, Stage


def run(settings: Settings, config: PolicyEvalConfig) -> Path:
    """Sample and score responses of all policies; write the tables."""
    from lightning_rlhf.stages.evaluate_policy import run_eval_policy  # which imports torch

    return run_eval_policy(settings, config)


STAGE = Stage(
    name="eval_policy",
    title="Evaluation of policies",
    config=PolicyEvalConfig,
    data="prompts",
    also_reads=("demonstrations",),
    run=run,
    reads_reward=True,
    reads_judge=True,
    reads_models=policy_folders,
    check=check_policies,
    summary=(HELD_OUT, "eval/reward_gain", "eval/win_rate", "eval/kl", "eval/perplexity"),
    hands_over="report",
    numbers="evaluation.json",
    divides=True,
)
