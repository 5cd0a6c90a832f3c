"""stage=rank: data from a policy's own responses, ranked by the reward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_rlhf.core.config import RankConfig
from lightning_rlhf.models.checkpoint import Final
from lightning_rlhf.stages.policies import Source, check_policy, find_policy
from lightning_rlhf.stages.stage import Settings, Stage

KEY = "rank.policy"


def run(settings: Settings, config: RankConfig) -> Path:
    """Sample and score responses; write preference pairs and demonstrations."""
    from lightning_rlhf.stages.rank_responses import run_rank  # which imports torch

    return run_rank(settings, config)


def source(settings: Settings) -> Source | None:
    """Return the policy that responds; None for the SFT model of the run."""
    config: RankConfig = settings.config
    return None if config.policy is None else find_policy(config.policy, KEY)


def read(settings: Settings) -> Mapping[str, Final]:
    """Return the policy that responds, where it is a folder."""
    policy = source(settings)
    return {"policy": policy} if isinstance(policy, Final) else {}


def check(settings: Settings, parents: Mapping[str, Final]) -> None:
    """Raise CheckpointError where the policy is not of the same base model as the SFT model."""
    if (policy := source(settings)) is not None:
        check_policy(policy, parents, KEY)


STAGE = Stage(
    name="rank",
    title="Ranked responses",
    config=RankConfig,
    data="prompts",
    run=run,
    reads_reward=True,
    reads_judge=True,
    reads_models=read,
    check=check,
    summary=("rank/reward_mean", "rank/best_reward", "rank/pairs"),
    hands_over="report",
    numbers="rank.json",
)
