"""The estimators against the divergence itself, summed over every token instead of sampled."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.kl import k1, k3

from .conftest import close, drawn


def logits(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(2 * torch.randn(size, generator=generator, dtype=torch.float64), -1)


pairs = st.tuples(st.integers(2, 12), st.integers(0, 999), st.integers(1000, 1999))


def test_a_known_pair_of_distributions() -> None:
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2):
    # KL = 1/2 ln 2 + 1/4 ln 1 + 1/4 ln 1/2 = 1/4 ln 2.
    p = torch.tensor([1 / 2, 1 / 4, 1 / 4], dtype=torch.float64)
    q = torch.tensor([1 / 4, 1 / 4, 1 / 2], dtype=torch.float64)
    divergence = torch.tensor(math.log(2) / 4, dtype=torch.float64)
    close((p * k1(p.log(), q.log())).sum(), divergence)
    close((p * k3(p.log(), q.log())).sum(), divergence)


def test_single_values_by_hand() -> None:
    # p = 1/2, q = 1/4: log p - log q = ln 2; r = 1/2, so (r - 1) - ln r = -1/2 + ln 2.
    # p = 1/4, q = 1/2: -ln 2; r = 2, so 1 - ln 2. k1 is negative here, k3 never.
    p = torch.tensor([1 / 2, 1 / 4], dtype=torch.float64).log()
    q = torch.tensor([1 / 4, 1 / 2], dtype=torch.float64).log()
    ln2 = math.log(2)
    close(k1(p, q), torch.tensor([ln2, -ln2], dtype=torch.float64))
    close(k3(p, q), torch.tensor([ln2 - 0.5, 1 - ln2], dtype=torch.float64))


@drawn
@given(pairs)
def test_both_are_unbiased(pair: tuple[int, int, int]) -> None:
    p, q = logits(pair[0], pair[1]), logits(pair[0], pair[2])
    divergence = (p.exp() * (p - q)).sum()
    close((p.exp() * k1(p, q)).sum(), divergence)
    close((p.exp() * k3(p, q)).sum(), divergence)


@drawn
@given(pairs, st.sampled_from([torch.float32, torch.float64]), st.floats(0, 1))
def test_k3_is_never_negative(pair: tuple[int, int, int], dtype: torch.dtype, near: float) -> None:
    p, q = logits(pair[0], pair[1]), logits(pair[0], pair[2])
    q = (p + near**8 * (q - p)).to(dtype)  # from far apart to next to each other
    assert (k3(p.to(dtype), q) >= 0).all()
    assert torch.equal(k3(q, q), torch.zeros_like(q))
    assert torch.equal(k1(q, q), torch.zeros_like(q))


def test_k3_keeps_its_digits_where_the_two_nearly_agree() -> None:
    # log r = x: exp(x) - 1 - x = x^2 / 2 + x^3 / 6 + ... Subtracting 1 from a rounded exp(x) would
    # leave an error of 1e-16 in 5e-13.
    x = torch.tensor([1e-6, -1e-6], dtype=torch.float64)
    close(k3(torch.zeros_like(x), x), x**2 / 2 + x**3 / 6, rtol=1e-6, atol=0)


@drawn
@given(pairs)
def test_gradients(pair: tuple[int, int, int]) -> None:
    # d k1 / d log p = 1 and d k1 / d log q = -1; k3 = r - 1 - log r has slope r - 1 in log q.
    p = logits(pair[0], pair[1]).requires_grad_()
    q = logits(pair[0], pair[2]).requires_grad_()
    k1(p, q).sum().backward()
    close(p.grad, torch.ones_like(p))
    close(q.grad, -torch.ones_like(q))
    p.grad = q.grad = None
    k3(p, q).sum().backward()
    ratio = (q - p).detach().exp()
    close(q.grad, ratio - 1)
    close(p.grad, 1 - ratio)
