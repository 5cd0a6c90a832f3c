"""The learned reward, standardised, over an ensemble, in batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.rewards.weighted import LearnedReward

from .three import decoded


def test_the_mean_becomes_zero_and_a_standard_deviation_one() -> None:
    raw = torch.tensor([[1.0], [3.0], [-2.0]])
    reward = LearnedReward(lambda tokens, mask: raw, 1.0, 2.0, 0.0, MicrobatchSize("k", 3))
    # Rows come in by length: 2, 2 and 3 tokens, which is their order.
    # (1 - 1) / 2, (3 - 1) / 2, (-2 - 1) / 2
    assert reward(decoded()).tolist() == [0.0, 1.0, -1.5]


def test_whole_sequences_are_scored_by_token_and_mask_whatever_the_batch() -> None:
    sizes = []

    def real_sum(tokens: Tensor, mask: Tensor) -> Tensor:
        sizes.append(len(tokens))
        return torch.where(mask, tokens, 0).sum(1, keepdim=True).float()

    for batch_size, expected in ((1, [1, 1, 1]), (2, [2, 1]), (5, [3])):
        sizes.clear()
        reward = LearnedReward(real_sum, 0.0, 1.0, 0.0, MicrobatchSize("k", batch_size))
        # 6 + 7 + 8, 3 + 5, 2 + 4: the longest is not the last, so that the order is restored.
        assert reward(decoded(rows=(2, 0, 1))).tolist() == [21.0, 8.0, 6.0]
        assert sizes == expected


def test_the_spread_of_an_ensemble_is_priced_in_standard_deviations() -> None:
    heads = torch.tensor([[1.0, 5.0], [2.0, 2.0], [0.0, -4.0]])
    reward = LearnedReward(lambda tokens, mask: heads, 1.0, 2.0, 0.5, MicrobatchSize("k", 3))
    # Means 3, 2, -2 and population deviations 2, 0, 2:
    # (3 - 1 - 0.5 * 2) / 2, (2 - 1) / 2, (-2 - 1 - 0.5 * 2) / 2.
    assert reward(decoded()).tolist() == [0.5, 0.5, -2.0]


def test_too_little_memory_halves_what_is_read_at_once() -> None:
    sizes = []

    def room_for_one(tokens: Tensor, mask: Tensor) -> Tensor:
        sizes.append(len(tokens))
        if len(tokens) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return tokens[:, :1].float()

    reward = LearnedReward(room_for_one, 0.0, 1.0, 0.0, MicrobatchSize("ppo.microbatch_size", 3))
    with pytest.warns(UserWarning, match=r"ppo\.microbatch_size is 1 from now on"):
        found = reward(decoded())
    assert sizes == [3, 1, 1, 1]
    assert found.tolist() == decoded().rollout.tokens[:, 0].tolist()
