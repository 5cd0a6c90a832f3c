"""stage=eval_reward: a report on whether a reward, of any source, is fit to be maximised by PPO."""

from __future__ import annotations

from pathlib import Path

from lightning_rlhf.core.config import EvalConfig
from lightning_rlhf.stages.evaluate_reward import run_eval
from lightning_rlhf.stages.run import Run
from lightning_rlhf.stages.stage import Stage


class EvalReward(Stage):
    """The fitness report, from scores of held-out pairs, samples of the SFT model and probes."""

    name = "eval_reward"
    title = "Fitness of a reward"
    config = EvalConfig
    data = "preferences"
    reads_reward = True
    summary = ("fitness/accuracy", "fitness/length_gap", "fitness/flags")
    hands_over = "report"
    divides = True

    def measure(self, run: Run) -> Path:
        return run_eval(run)
