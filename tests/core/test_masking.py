"""Sums, means and whitening: what stands on padding has no say, whatever it is."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.core.masking import masked_mean, masked_sum, masked_whiten

from .conftest import NAN, F, Ragged, T, close, drawn, garbage, pad, ragged

X = torch.tensor([[1.0, 2.0, NAN], [6.0, math.inf, 3.0]], dtype=torch.float64)
MASK = torch.tensor([[T, T, F], [T, F, T]])


def test_sum_and_mean_by_hand() -> None:
    # 1 + 2 + 6 + 3 = 12 over four real elements; the NaN and the infinity are padding.
    assert masked_sum(X, MASK).item() == 12
    assert masked_mean(X, MASK).item() == 3


def test_nothing_real_sums_to_zero_and_has_no_mean() -> None:
    nothing = torch.zeros_like(MASK)
    assert masked_sum(X, nothing).item() == 0
    assert masked_mean(X, nothing).isnan()


def test_whiten_by_hand() -> None:
    # 1, 2, 6, 3: mean 3, deviations -2, -1, 3, 0, population variance (4 + 1 + 9 + 0) / 4 = 7/2.
    # The unbiased variance would be 14/3.
    expected = torch.tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]], dtype=torch.float64)
    close(masked_whiten(X, MASK, eps=0.0), expected / math.sqrt(3.5))


def test_eps_is_added_to_the_variance() -> None:
    # Variance 7/2 and eps 1/2 make sqrt(4) = 2 the divisor.
    expected = torch.tensor([[-1.0, -0.5, 0.0], [1.5, 0.0, 0.0]], dtype=torch.float64)
    close(masked_whiten(X, MASK, eps=0.5), expected)


def test_whitening_a_constant_gives_zero_and_not_nan() -> None:
    constant = torch.full((2, 3), 5.0, dtype=torch.float64)
    assert torch.equal(masked_whiten(constant, MASK), torch.zeros_like(constant))
    one = torch.tensor([[T, F, F], [F, F, F]])
    assert torch.equal(masked_whiten(X, one), torch.zeros_like(X))


@drawn
@given(ragged(max_rows=6))
def test_whitened_has_mean_zero_and_population_deviation_one(batch: Ragged) -> None:
    x, mask = batch.normal(0), batch.mask
    white = masked_whiten(x, mask, eps=0.0)
    assert torch.equal(white[~mask], torch.zeros_like(white[~mask]))
    if mask.sum() > 1:
        close(white[mask].mean(), torch.zeros((), dtype=x.dtype), atol=1e-9)
        close(white[mask].std(correction=0), torch.ones((), dtype=x.dtype))


@drawn
@given(ragged(), st.integers(1, 4), garbage)
def test_more_padding_changes_nothing(batch: Ragged, columns: int, filler: float) -> None:
    x, mask = batch.normal(0), batch.mask
    wide, wide_mask = pad(x, columns, filler), pad(mask, columns, False)
    # The sum runs over more zeros, in another order of additions: equal to float rounding.
    close(masked_sum(wide, wide_mask), masked_sum(x, mask))
    close(masked_mean(wide, wide_mask), masked_mean(x, mask))
    close(masked_whiten(wide, wide_mask), pad(masked_whiten(x, mask), columns, 0.0))


@drawn
@given(ragged())
def test_the_order_of_the_rows_does_not_matter(batch: Ragged) -> None:
    x, mask, order = batch.normal(0), batch.mask, batch.shuffled_rows()
    close(masked_sum(x[order], mask[order]), masked_sum(x, mask))
    close(masked_mean(x[order], mask[order]), masked_mean(x, mask))
    close(masked_whiten(x[order], mask[order]), masked_whiten(x, mask)[order])


@drawn
@given(ragged(), st.integers(1, 3))
def test_parts_over_the_count_of_the_whole_add_up_to_the_mean(batch: Ragged, size: int) -> None:
    x, mask = batch.normal(0), batch.mask
    parts = zip(x.split(size), mask.split(size), strict=True)
    total = sum((masked_sum(a, m) / mask.sum() for a, m in parts), torch.zeros(()))
    close(total, masked_mean(x, mask))


@drawn
@given(ragged(), st.floats(0.1, 10), st.floats(-5, 5))
def test_whitening_forgets_scale_and_offset(batch: Ragged, scale: float, offset: float) -> None:
    x, mask = batch.normal(0), batch.mask
    if mask.sum() > 1:
        moved = masked_whiten(scale * x + offset, mask, eps=0.0)
        close(moved, masked_whiten(x, mask, eps=0.0), rtol=1e-8, atol=1e-8)


@drawn
@given(ragged())
def test_a_copy_of_the_batch_changes_nothing(batch: Ragged) -> None:
    x, mask = batch.normal(0), batch.mask
    twice = masked_whiten(torch.cat([x, x]), torch.cat([mask, mask]))
    close(twice, masked_whiten(x, mask).repeat(2, 1))


@drawn
@given(ragged())
def test_gradients_are_those_of_the_elements_alone(batch: Ragged) -> None:
    mask, weight = batch.mask, batch.normal(1).nan_to_num()
    for function, slow in (
        (masked_sum, lambda real: real.sum()),
        (masked_mean, lambda real: real.sum() / len(real)),
    ):
        x = batch.normal(0).requires_grad_()
        function(x, mask).backward()
        real = batch.normal(0)[mask].requires_grad_()
        slow(real).backward()
        close(x.grad[mask], real.grad)
        assert torch.equal(x.grad[~mask], torch.zeros_like(x.grad[~mask]))

    x = batch.normal(0).nan_to_num().requires_grad_()
    (masked_whiten(x, mask, eps=0.1) * weight).sum().backward()
    real = x.detach()[mask].requires_grad_()
    white = (real - real.mean()) / (((real - real.mean()) ** 2).mean() + 0.1).sqrt()
    (white * weight[mask]).sum().backward()
    close(x.grad[mask], real.grad)


def test_nan_on_padding_does_not_reach_the_gradient_of_whitening() -> None:
    x = X.clone().requires_grad_()
    masked_whiten(x, MASK).sum().backward()
    assert x.grad.isfinite().all()


def test_arguments_are_left_alone() -> None:
    x, mask = X.clone(), MASK.clone()
    masked_whiten(x, mask)
    masked_mean(x, mask)
    assert torch.equal(x.nan_to_num(), X.nan_to_num())
    assert torch.equal(mask, MASK)
