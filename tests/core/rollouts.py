"""Rollouts and scores that need no model: one by hand, others of drawn shape."""

from __future__ import annotations

from typing import Any

import torch

from lightning_rlhf.core.experience import make_experience, token_rewards
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.records import Experience, Rollout, Scores
from lightning_rlhf.core.shaping import RunningMoments, ScoreMoments

from .conftest import F, Ragged, T

SEEN = RunningMoments(count=4, mean=1.0, squares=16.0)  # std 2


def by_hand() -> tuple[Rollout, Scores]:
    """Two responses, of 2 and 1 of 2 tokens, after a prompt of one token."""
    rollout = Rollout(
        tokens=torch.tensor([[5, 1, 2], [6, 3, 0]]), mask=torch.tensor([[T, T, T], [T, T, F]]),
        response_mask=torch.tensor([[T, T], [T, F]]), ended=torch.tensor([T, F]),
        logprobs=torch.tensor([[-1.0, -2.0], [-1.0, 0.0]], dtype=torch.float64),
        values=torch.tensor([[0.5, 1.0], [2.0, 0.0]], dtype=torch.float64),
        index=torch.tensor([7, 3]),
    )  # fmt: skip
    scores = Scores(
        component_scores=torch.tensor([[3.0], [1.0]], dtype=torch.float64),
        score=torch.tensor([3.0, 1.0], dtype=torch.float64),
        ref_logprobs=torch.tensor([[-2.0, -1.0], [-3.0, 0.0]], dtype=torch.float64),
    )
    return rollout, scores


def drawn_rollout(batch: Ragged) -> tuple[Rollout, Scores]:
    prompt_mask = torch.ones(len(batch.lengths), 2, dtype=torch.bool)
    tokens = torch.arange(len(batch.lengths) * (2 + batch.width)).view(len(batch.lengths), -1)
    rollout = Rollout(
        tokens=tokens, mask=torch.cat([prompt_mask, batch.mask], dim=1), response_mask=batch.mask,
        ended=batch.row_normal(0) > 0, logprobs=batch.normal(1), values=batch.normal(2),
        index=torch.arange(len(batch.lengths)),
    )  # fmt: skip
    scores = Scores(
        component_scores=batch.row_normal(3)[:, None], score=batch.row_normal(3),
        ref_logprobs=batch.normal(4), vocabulary_kl=batch.normal(5) ** 2,
    )  # fmt: skip
    return rollout, scores


def make(
    rollout: Rollout, scores: Scores, config: PPOConfig, kl_coef: float = 0.5, **others: Any
) -> Experience:
    """The experience; by default the moments are those of four scores of mean 1 and deviation 2."""
    others = {"moments": ScoreMoments(SEEN, (SEEN,))} | others
    rewards = token_rewards(rollout, scores, config, kl_coef=kl_coef, **others)
    return make_experience(rollout, scores, config, rewards)
