"""What each token's loss counts: the three denominators, and the sum over micro-batches."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.losses import token_weights
from lightning_rlhf.core.masking import masked_sum
from lightning_rlhf.core.ppo_config import Reduction

from .conftest import F, Ragged, T, close, drawn, pad, ragged

ROOM = 8  # tokens a response may have; no drawn response is longer
# Weights are fp32: a sum of a few is good to about 1e-7 of it.
FP32 = {"rtol": 1e-6, "atol": 1e-7}
reductions = st.sampled_from(get_args(Reduction))


def weights(mask: Tensor, reduction: Reduction) -> Tensor:
    return token_weights(mask, reduction, max_response_tokens=ROOM)


def slow(losses: Tensor, lengths: tuple[int, ...], reduction: Reduction) -> Tensor:
    """The reduced loss, from the rows of real tokens."""
    rows = [row[:length] for row, length in zip(losses, lengths, strict=True)]
    if reduction == "token_mean":
        return torch.cat(rows).mean()
    if reduction == "sequence_mean":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.stack([row.sum() / ROOM for row in rows]).mean()


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        # Four real tokens; two responses of three and one; room for eight.
        ("token_mean", [[1 / 4, 1 / 4, 1 / 4], [1 / 4, 0, 0]]),
        ("sequence_mean", [[1 / 6, 1 / 6, 1 / 6], [1 / 2, 0, 0]]),
        ("constant", [[1 / 16, 1 / 16, 1 / 16], [1 / 16, 0, 0]]),
    ],
)
def test_by_hand(reduction: Reduction, expected: list[list[float]]) -> None:
    mask = torch.tensor([[T, T, T], [T, F, F]])
    close(weights(mask, reduction), torch.tensor(expected), rtol=1e-6)


@drawn
@given(ragged())
def test_what_the_weights_sum_to(batch: Ragged) -> None:
    one = torch.tensor(1.0)
    close(weights(batch.mask, "token_mean").sum(), one, **FP32)
    close(weights(batch.mask, "sequence_mean").sum(), one, **FP32)
    share = sum(batch.lengths) / (len(batch.lengths) * ROOM)
    close(weights(batch.mask, "constant").sum(), share * one, **FP32)
    # Every response counts the same.
    rows = weights(batch.mask, "sequence_mean").sum(dim=1)
    close(rows, torch.full_like(rows, 1 / len(rows)), **FP32)


@drawn
@given(ragged(), reductions, st.integers(1, 3))
def test_micro_batches_add_up_to_the_loss_of_the_minibatch(
    batch: Ragged, reduction: Reduction, size: int
) -> None:
    losses, mask = batch.normal(0), batch.mask
    parts = zip(
        losses.split(size), mask.split(size), weights(mask, reduction).split(size), strict=True
    )
    found = sum((masked_sum(w * x, m) for x, m, w in parts), torch.zeros((), dtype=torch.float64))
    close(found, slow(losses, batch.lengths, reduction), **FP32)


@drawn
@given(ragged(), reductions)
def test_the_gradient_of_a_token_is_its_weight(batch: Ragged, reduction: Reduction) -> None:
    losses = batch.normal(0).requires_grad_()
    slow(losses, batch.lengths, reduction).backward()
    assert losses.grad is not None
    close(weights(batch.mask, reduction).double(), losses.grad, **FP32)


@drawn
@given(ragged(), reductions, st.integers(1, 2))
def test_padding_and_rows(batch: Ragged, reduction: Reduction, columns: int) -> None:
    mask, order = batch.mask, batch.shuffled_rows()
    whole = weights(mask, reduction)
    assert torch.equal(weights(pad(mask, columns, F), reduction), pad(whole, columns, 0.0))
    assert torch.equal(weights(mask[order], reduction), whole[order])
    assert (whole[~mask] == 0).all()
    assert (whole[mask] > 0).all()
