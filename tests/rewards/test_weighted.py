"""Several sources, their checks, and the learned one, standardised, in batches."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.config import Term
from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.rewards.weighted import LearnedReward, Reward

from .conftest import three_replies as decoded


def term(name: str) -> Term:
    return Term(name=name, weight=1.0, normalization="none", clip=None)


def test_each_component_is_a_column() -> None:
    reward = Reward(
        (term("length"), term("constant")),
        (lambda found: [len(text) for text in found.responses], lambda found: torch.ones(3)),
    )
    found, _ = reward(decoded(["a", "bc", ""]))
    assert found.tolist() == [[1.0, 1.0], [2.0, 1.0], [0.0, 1.0]]
    assert found.dtype == torch.float32


def test_numbers_come_in_many_forms() -> None:
    for numbers in ((1, 2.5, -3), torch.tensor([1, 2.5, -3]).double(), np.array([1, 2.5, -3])):
        found, parts = Reward.of(lambda _, numbers=numbers: numbers)(decoded())
        assert not parts.any()
        assert found.tolist() == [[1.0], [2.5], [-3.0]]
        assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("numbers", "gave"), [([1.0, math.nan, 2.0], "nan"), ([1.0, None, 2.0], "None")]
)
def test_a_number_that_is_missing_or_not_finite_is_named(numbers: Any, gave: str) -> None:
    reward = Reward((term("fine"), term("bad")), (lambda found: [1, 2, 3], lambda found: numbers))
    message = (
        f"reward 'bad' gave {gave} for the response 'two' to the prompt 'question 1'; allowed: a "
        "finite number"
    )
    with pytest.raises(RewardError, match=f"^{re.escape(message)}$"):
        reward(decoded())


def test_one_number_for_each_response() -> None:
    with pytest.raises(RewardError, match=r"gave .* for 3 responses; allowed: a list of one numb"):
        Reward.of(lambda found: [1.0, 2.0])(decoded())


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
