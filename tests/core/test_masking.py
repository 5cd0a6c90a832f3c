"""Where the real tokens are; sums, moments and whitening, which do not depend on padding."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.core.masking import (
    from_first_real,
    masked_moments,
    masked_rescale,
    masked_sum,
    masked_whiten,
)

from .conftest import NAN, F, T, close

X = torch.tensor([[1.0, 2.0, NAN], [6.0, math.inf, 3.0]], dtype=torch.float64)
MASK = torch.tensor([[T, T, F], [T, F, T]])


@pytest.mark.parametrize("value", [1000.1, -7.7, 1e-3])
@pytest.mark.parametrize("shape", [(64, 100), (1, 3)])
def test_numbers_that_are_all_alike_whiten_to_0(value: float, shape: tuple[int, int]) -> None:
    """Their mean, rounded, must not pass for a deviation beside the 1e-8 under the root."""
    x, mask = torch.full(shape, value), torch.ones(shape, dtype=torch.bool)
    mask[0, -1] = False
    assert masked_moments(x, mask)[1] == 0
    assert masked_whiten(x, mask).abs().max() == 0


def test_moments_whitening_and_rescaling_by_hand() -> None:
    # 1, 2, 6, 3: mean 3, deviations -2, -1, 3, 0, population variance (4 + 1 + 9 + 0) / 4 = 7/2.
    # The unbiased variance would be 14/3. Rescaled keeps the mean. NaN and infinity are padding.
    assert masked_sum(X, MASK).item() == 12
    deviations = torch.tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]], dtype=torch.float64)
    mean, variance = masked_moments(X, MASK)
    assert (mean.item(), variance.item()) == (3, 3.5)
    white = deviations / math.sqrt(3.5 + 1e-8)
    close(masked_whiten(X, MASK), white)
    close(masked_rescale(X, MASK), torch.where(MASK, white + 3, 0))


def test_rows_are_moved_onto_their_padding() -> None:
    tokens = torch.tensor([[0, 0, 7, 1, 2, 0], [5, 6, 0, 0, 0, 0], [0, 9, 8, 1, 0, 0]])
    mask = torch.tensor(
        [[0, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0]], dtype=torch.bool
    )
    moved, where = from_first_real(tokens, mask)
    assert where.tolist() == [[True] * 3, [True, True, False], [True] * 3]
    assert moved[where].tolist() == [7, 1, 2, 5, 6, 9, 8, 1]
