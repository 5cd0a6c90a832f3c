"""Several sources and their checks."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rlhf.core.config import Term
from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.rewards.weighted import Reward

from .three import decoded


def term(name: str) -> Term:
    return Term(name=name, weight=1.0, normalization="none", clip=None)


def test_each_component_is_a_column() -> None:
    reward = Reward(
        (term("length"), term("constant")),
        (lambda found: [len(text) for text in found.responses], lambda found: torch.ones(3)),
    )
    found = reward(decoded(["a", "bc", ""]))
    assert found.tolist() == [[1.0, 1.0], [2.0, 1.0], [0.0, 1.0]]
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    "numbers",
    [[1, 2.5, -3], torch.tensor([1, 2.5, -3]).double(), np.array([1, 2.5, -3], np.float32)],
    ids=["list", "tensor", "array"],
)
def test_numbers_come_in_many_forms(numbers: Any) -> None:
    found = Reward.of(lambda found: numbers)(decoded())
    assert found.tolist() == [[1.0], [2.5], [-3.0]]
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("numbers", "gave"),
    [
        ([1.0, math.nan, 2.0], "nan"),
        ([1.0, math.inf, 2.0], "inf"),
        ([1.0, None, 2.0], "None"),
        ([1.0, "2", 2.0], "'2'"),
        ([1.0, torch.ones(2), 2.0], "tensor([1., 1.])"),
        (torch.tensor([1.0, math.nan, 2.0]), "nan"),
    ],
)
def test_a_number_that_is_missing_or_not_finite_is_named(numbers: Any, gave: str) -> None:
    reward = Reward((term("fine"), term("bad")), (lambda found: [1, 2, 3], lambda found: numbers))
    message = (
        f"reward 'bad' gave {gave} for the response 'two' to the prompt 'question 1'; allowed: a "
        "finite number"
    )
    with pytest.raises(RewardError, match=f"^{re.escape(message)}$"):
        reward(decoded())


@pytest.mark.parametrize("numbers", [[1.0, 2.0], torch.ones(4), None, "abc", {}, torch.ones(())])
def test_one_number_for_each_response(numbers: Any) -> None:
    with pytest.raises(RewardError, match=r"gave .* for 3 responses; allowed: a list of one numb"):
        Reward.of(lambda found: numbers)(decoded())
