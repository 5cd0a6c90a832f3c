"""stage=rank: data from a policy's own responses, ranked by the reward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_rlhf.core.config import RankConfig
from lightning_rlhf.models.checkpoint import Final
from lightning_rlhf.stages.policies import responder
from lightning_rlhf.stages.rank_responses import run_rank
from lightning_rlhf.stages.run import Run
from lightning_rlhf.stages.stage import Settings, Stage


class Rank(Stage):
    """Preference pairs and demonstrations, from sampled and scored responses."""

    name = "rank"
    title = "Ranked responses"
    config = RankConfig
    data = "prompts"
    reads_reward = True
    reads_judge = True
    summary = ("rank/reward_mean", "rank/best_reward", "rank/pairs")
    hands_over = "report"
    numbers = "rank.json"
    divides = True

    def models(self, settings: Settings) -> Mapping[str, Final]:
        policy = responder(settings)
        return {"policy": policy} if isinstance(policy, Final) else {}

    def measure(self, run: Run) -> Path:
        return run_rank(run)
