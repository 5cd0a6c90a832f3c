"""Whitening and its moments against TRL's functions."""

import math

import torch
from trl.experimental.ppo.ppo_trainer import masked_mean, masked_var, masked_whiten

from lightning_rlhf.core import masking

from .conftest import close, ragged


def spread(variance: torch.Tensor, tokens: int) -> torch.Tensor:
    """How much larger our whitened numbers are than TRL's.

    Ours divides by sqrt(v + 1e-8), TRL by sqrt(v n / (n - 1) + 1e-8).
    """
    return ((variance * tokens / (tokens - 1) + 1e-8) / (variance + 1e-8)).sqrt()


def test_mean_and_population_variance() -> None:
    mask, x, _ = ragged(rows=7, width=9, seed=0)
    mean, variance = masking.masked_moments(x, mask)
    close(mean, masked_mean(x, mask))
    close(variance, masked_var(x, mask, unbiased=False))


def test_variance_differs_by_bessels_correction() -> None:
    mask, x, _ = ragged(rows=7, width=9, seed=0)
    tokens = int(mask.sum())
    _, variance = masking.masked_moments(x, mask)
    close(masked_var(x, mask), variance * tokens / (tokens - 1))


def test_whitening_to_mean_0_differs_by_the_variance() -> None:
    mask, x, _ = ragged(rows=7, width=9, seed=0)
    _, variance = masking.masked_moments(x, mask)
    ours, theirs = masking.masked_whiten(x, mask)[mask], masked_whiten(x, mask)[mask]
    factor = spread(variance, int(mask.sum()))
    close(ours, theirs * factor)
    assert factor > 1


def test_whitening_about_the_mean_differs_by_the_variance() -> None:
    mask, x, _ = ragged(rows=7, width=9, seed=0)
    mean, variance = masking.masked_moments(x, mask)
    ours = masking.masked_rescale(x, mask)[mask]
    theirs = masked_whiten(x, mask, shift_mean=False)[mask]
    close(ours - mean, (theirs - mean) * spread(variance, int(mask.sum())))


def test_one_token_has_no_unbiased_variance() -> None:
    x, mask = torch.tensor([3.0]), torch.tensor([True])
    assert math.isnan(masked_whiten(x, mask).item())
    assert masking.masked_whiten(x, mask).item() == 0


def test_on_padding_ours_is_0_and_trls_is_what_the_caller_masks() -> None:
    mask, x, _ = ragged(rows=7, width=9, seed=0)
    mean, variance = masked_mean(x, mask), masked_var(x, mask)
    assert not masking.masked_whiten(x, mask)[~mask].any()
    theirs = masked_whiten(x, mask)[~mask]
    close(theirs, (-mean * (variance + 1e-8).rsqrt()).expand_as(theirs))


def test_nan_on_padding_reaches_trls_mean_and_not_ours() -> None:
    mask, x, _ = ragged(rows=7, width=9, seed=0)
    poisoned = x.masked_fill(~mask, math.nan)
    assert masked_whiten(poisoned, mask).isnan().all()
    close(masking.masked_whiten(poisoned, mask), masking.masked_whiten(x, mask))
