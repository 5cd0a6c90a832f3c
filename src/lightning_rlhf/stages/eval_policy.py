"""stage=eval_policy: policies against each other and against the SFT model, on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_rlhf.core.config import PolicyEvalConfig
from lightning_rlhf.core.metrics import HELD_OUT
from lightning_rlhf.models.checkpoint import Final
from lightning_rlhf.stages.evaluate_policy import run_eval_policy
from lightning_rlhf.stages.policies import policy_folders
from lightning_rlhf.stages.run import Run
from lightning_rlhf.stages.stage import Settings, Stage


class EvalPolicy(Stage):
    """Tables of sampled and scored responses of all policies."""

    name = "eval_policy"
    title = "Evaluation of policies"
    config = PolicyEvalConfig
    data = "prompts"
    also_reads = ("demonstrations",)
    reads_reward = True
    reads_judge = True
    summary = (HELD_OUT, "eval/reward_gain", "eval/win_rate", "eval/kl", "eval/perplexity")
    hands_over = "report"
    numbers = "evaluation.json"
    divides = True

    def models(self, settings: Settings) -> Mapping[str, Final]:
        return policy_folders(settings)

    def measure(self, run: Run) -> Path:
        return run_eval_policy(run)
