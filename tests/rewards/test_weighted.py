"""Several sources, their checks, and the learned one, standardised, in batches."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_rlhf.core.config import Term
from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.records import DecodedResponses
from lightning_rlhf.rewards.weighted import LearnedReward, Reward

from .conftest import make_replies
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


PIECES = {1: b"hi", 2: b"\n", 3: b"\xc3", 4: b"\xa9", 5: b"!", 9: b""}


def in_pieces() -> DecodedResponses:
    """A response in six tokens, two of them halves of a character, and another in one."""
    found = make_replies(("q", "hi\né!"), ("q", "hi"))
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5, 9], [0, 1, 0, 0, 0, 0, 0]])
    rollout = replace(found.rollout, tokens=tokens, response_mask=tokens[:, 1:] > 0)

    def decode(given: Sequence[int]) -> str:
        return b"".join(PIECES[one] for one in given).decode(errors="replace")

    return replace(found, rollout=rollout, decode=decode)


def test_parts_are_paid_at_the_tokens_that_end_them() -> None:
    """The last token, an end token without text, has those that end with the text."""
    whole = in_pieces()
    assert [whole.token_at(0, end) for end in range(6)] == [0, 0, 0, 1, 3, 5]
    parts = [[(1, 1.0), (2, 2.0), (3, -4.0), (4, 8.0), (5, 16.0)], [(2, 0.5)]]
    numbers, placed = Reward((term("a"), term("b")), (lambda _: parts, lambda _: [7, []]))(whole)
    assert numbers.tolist() == [[23, 7], [0.5, 0]]
    assert placed[:, 0].tolist() == [[3, -4, 0, 8, 0, 16], [0.5, 0, 0, 0, 0, 0]]
    assert not placed[:, 1].any()


@pytest.mark.parametrize(
    "parts", [[(3, 1.0)], [(-1, 1.0)], [(1, math.inf)], [(1, "2")], [("1", 2.0)], [1.0], [None]]
)
def test_a_part_that_ends_outside_of_its_response_is_named(parts: Any) -> None:
    message = "reward 'reward' gave .* for the response 'hi' to the prompt 'q'; allowed: a list of "
    with pytest.raises(RewardError, match=f"^{message}.*, with ends from 0 to its 2$"):
        Reward.of(lambda _: [1.0, parts])(in_pieces())


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


def test_the_spread_of_an_ensemble_is_penalised_in_standard_deviations() -> None:
    heads = torch.tensor([[1.0, 5.0], [2.0, 2.0], [0.0, -4.0]])
    reward = LearnedReward(lambda tokens, mask: heads, 1.0, 2.0, 0.5, MicrobatchSize("k", 3))
    # Means 3, 2, -2 and population deviations 2, 0, 2:
    # (3 - 1 - 0.5 * 2) / 2, (2 - 1) / 2, (-2 - 1 - 0.5 * 2) / 2.
    assert reward(decoded()).tolist() == [0.5, 0.5, -2.0]
