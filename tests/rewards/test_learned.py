"""The learned reward, standardised."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlhf.core.types import Rollout
from lightning_rlhf.rewards.learned import LearnedReward

TOKENS = torch.tensor([[0, 3, 5], [2, 4, 0], [6, 7, 8]])
MASK = torch.tensor([[False, True, True], [True, True, False], [True, True, True]])


def make_rollout() -> Rollout:
    return Rollout(
        tokens=TOKENS,
        mask=MASK,
        response_mask=MASK[:, 2:],
        ended=torch.tensor([True, True, False]),
        logprobs=torch.zeros(3, 1),
        values=torch.zeros(3, 1),
        index=torch.arange(3),
    )


def test_the_mean_becomes_zero_and_a_standard_deviation_one() -> None:
    raw = torch.tensor([1.0, 3.0, -2.0])
    reward = LearnedReward(lambda tokens, mask: raw, mean=1.0, std=2.0)
    # (1 - 1) / 2, (3 - 1) / 2, (-2 - 1) / 2
    assert reward(make_rollout()).tolist() == [0.0, 1.0, -1.5]


def test_whole_sequences_are_scored_by_token_and_mask() -> None:
    def real_sum(tokens: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, tokens, 0).sum(1).float()

    reward = LearnedReward(real_sum, mean=0.0, std=1.0)
    # 3 + 5, 2 + 4, 6 + 7 + 8
    assert reward(make_rollout()).tolist() == [8.0, 6.0, 21.0]


def test_no_gradient_is_kept() -> None:
    weight = torch.ones(3, requires_grad=True)
    reward = LearnedReward(lambda tokens, mask: weight * 2, mean=0.0, std=1.0)
    assert not reward(make_rollout()).requires_grad
