"""stage=eval_reward: a report on whether a reward, of any source, is fit to be maximised by PPO."""

from __future__ import annotations

from pathlib import Path

from lightning_rlhf.core.config import EvalConfig
from lightning_rlhf.stages.stage import Settings, Stage


def run(settings: Settings, config: EvalConfig) -> Path:
    """Score held-out pairs, samples of the SFT model and probes; write the report."""
    from lightning_rlhf.stages.evaluate_reward import run_eval  # which imports torch

    return run_eval(settings, config)


STAGE = Stage(
    name="eval_reward",
    title="Fitness of a reward",
    config=EvalConfig,
    data="preferences",
    run=run,
    reads_reward=True,
    summary=("fitness/accuracy", "fitness/length_gap", "fitness/flags"),
    hands_over="report",
    divides=True,
)
