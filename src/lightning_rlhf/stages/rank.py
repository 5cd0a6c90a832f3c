"""stage=rank: data from a policy's own responses, ranked by the reward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_rlhf.core.config import RankConfig
from lightning_rlhf.models.checkpoint import Final
from lightning_rlhf.stages.policies import RESPONDER, check_policy, responder
from lightning_rlhf.stages.stage import Settings, Stage


def run(settings: Settings, config: RankConfig) -> Path:
    """Sample and score responses; write preference pairs and demonstrations."""
    from lightning_rlhf.stages.rank_responses import run_rank  # which imports torch

    return run_rank(settings, config)


def read(settings: Settings) -> Mapping[str, Final]:
    """Return the policy that responds, where it is a folder."""
    policy = responder(settings)
    return {"policy": policy} if isinstance(policy, Final) else {}


def check(settings: Settings, parents: Mapping[str, Final]) -> None:
    """Raise CheckpointError where the policy is not of the same base model as the SFT model."""
    if (policy := responder(settings)) is not None:
        check_policy(policy, parents, RESPONDER)


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
    divides=True,
)
