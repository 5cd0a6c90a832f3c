"""The estimators against the divergence, token by token; best-of-n against closed forms."""

from __future__ import annotations

import math
import random
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.kl import ESTIMATORS, absolute, best_of_kl, best_of_kl_bound, k1, k2, k3
from lightning_rlhf.core.ppo_config import KLEstimator

from .conftest import close, drawn

LN2 = math.log(2)


def doubles(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def logits(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(2 * torch.randn(size, generator=generator, dtype=torch.float64), -1)


pairs = st.tuples(st.integers(2, 12), st.integers(0, 999), st.integers(1000, 1999))


def test_a_known_pair_of_distributions() -> None:
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2), so log p - log q = (ln 2, 0, -ln 2):
    #   KL       = 1/2 ln 2 + 1/4 ln 1 - 1/4 ln 2 = 1/4 ln 2
    #   E_p[k2]  = 1/2 (1/2 ln^2 2) + 1/4 (1/2 ln^2 2) = 3/8 ln^2 2
    #   its bias = 3/8 ln^2 2 - 1/4 ln 2 = 1/8 ln 2 (3 ln 2 - 2), about 0.0069
    #   E_p[abs] = 1/2 ln 2 + 1/4 ln 2 = 3/4 ln 2
    p, q = doubles(1 / 2, 1 / 4, 1 / 4), doubles(1 / 4, 1 / 4, 1 / 2)
    divergence = LN2 / 4
    expected = {k1: divergence, k3: divergence, absolute: 3 / 4 * LN2}
    for estimator, mean in expected.items():
        close((p * estimator(p.log(), q.log())).sum(), doubles(mean)[0])
    bias = (p * k2(p.log(), q.log())).sum() - divergence
    close(bias, doubles(LN2 * (3 * LN2 - 2) / 8)[0])


def test_single_values_by_hand() -> None:
    # p = 1/2, q = 1/4: log p - log q = ln 2; r = 1/2, so (r - 1) - ln r = -1/2 + ln 2.
    # p = 1/4, q = 1/2: -ln 2; r = 2, so 1 - ln 2. k1 is negative here, the others never.
    p, q = doubles(1 / 2, 1 / 4).log(), doubles(1 / 4, 1 / 2).log()
    close(k1(p, q), doubles(LN2, -LN2))
    close(k2(p, q), doubles(LN2**2 / 2, LN2**2 / 2))
    close(k3(p, q), doubles(LN2 - 0.5, 1 - LN2))
    close(absolute(p, q), doubles(LN2, LN2))


def test_the_names_of_the_configuration() -> None:
    # The single values above tell the estimators apart; "full" has a function of its own.
    p, q = doubles(1 / 4).log(), doubles(1 / 2).log()
    expected = {"k1": -LN2, "k2": LN2**2 / 2, "k3": 1 - LN2, "abs": LN2, "mse": LN2**2 / 2}
    for name, value in expected.items():
        close(ESTIMATORS[name](p, q), doubles(value))
    assert set(ESTIMATORS) == set(get_args(KLEstimator)) - {"full"}


@drawn
@given(pairs)
def test_k1_and_k3_are_unbiased(pair: tuple[int, int, int]) -> None:
    p, q = logits(pair[0], pair[1]), logits(pair[0], pair[2])
    divergence = (p.exp() * (p - q)).sum()
    close((p.exp() * k1(p, q)).sum(), divergence)
    close((p.exp() * k3(p, q)).sum(), divergence)


@drawn
@given(pairs, st.sampled_from([torch.float32, torch.float64]), st.floats(0, 1))
def test_all_but_k1_are_never_negative(
    pair: tuple[int, int, int], dtype: torch.dtype, near: float
) -> None:
    p, q = logits(pair[0], pair[1]), logits(pair[0], pair[2])
    q = (p + near**8 * (q - p)).to(dtype)  # from far apart to next to each other
    for estimator in (k2, k3, absolute):
        assert (estimator(p.to(dtype), q) >= 0).all()
    for estimator in (k1, k2, k3, absolute):
        assert torch.equal(estimator(q, q), torch.zeros_like(q))


def test_k3_keeps_its_digits_where_the_two_nearly_agree() -> None:
    # log r = x: exp(x) - 1 - x = x^2 / 2 + x^3 / 6 + ... Subtracting 1 from a rounded exp(x) would
    # leave an error of 1e-16 in 5e-13.
    x = doubles(1e-6, -1e-6)
    close(k3(torch.zeros_like(x), x), x**2 / 2 + x**3 / 6, rtol=1e-6, atol=0)


@drawn
@given(pairs)
def test_slopes_in_the_log_probabilities(pair: tuple[int, int, int]) -> None:
    # With d = log p - log q and r = exp(-d), the slopes in log p; those in log q are the opposite:
    #   k1: 1        k2: d        k3 = r - 1 + d: 1 - r        abs: sign d
    start, other = logits(pair[0], pair[1]), logits(pair[0], pair[2])
    d = start - other
    slopes = {k1: torch.ones_like(d), k2: d, k3: 1 - (-d).exp(), absolute: d.sign()}
    for estimator, slope in slopes.items():
        p, q = start.clone().requires_grad_(), other.clone().requires_grad_()
        estimator(p, q).sum().backward()
        close(p.grad, slope)
        close(q.grad, -slope)


def expected_gradient(name: str, scores: Tensor, q: Tensor) -> Tensor:
    """E_p[grad of the estimator as a loss], p = softmax(scores), summed over the vocabulary."""
    leaf = scores.clone().requires_grad_()
    p = torch.log_softmax(leaf, -1)
    (p.detach().exp() * ESTIMATORS[name](p, q)).sum().backward()
    return leaf.grad


@drawn
@given(pairs)
def test_what_each_estimator_holds_back_as_a_loss(pair: tuple[int, int, int]) -> None:
    # For p = softmax(s): d p_u / d s_v = p_u ([u = v] - p_v). So
    #   d KL(p || q) / d s_v = p_v (log p_v - log q_v - KL(p || q))
    #   d KL(q || p) / d s_v = p_v - q_v
    p, q = logits(pair[0], pair[1]), logits(pair[0], pair[2])
    d = p - q
    close(expected_gradient("k1", p, q), torch.zeros_like(p))
    close(expected_gradient("k2", p, q), p.exp() * (d - (p.exp() * d).sum()))
    close(expected_gradient("k3", p, q), p.exp() - q.exp())


@drawn
@given(pairs)
def test_the_two_gradients_by_hand_are_those_of_autograd(pair: tuple[int, int, int]) -> None:
    s, q = logits(pair[0], pair[1]).requires_grad_(), logits(pair[0], pair[2])
    p = torch.log_softmax(s, -1)
    forward, backward = (p.exp() * (p - q)).sum(), (q.exp() * (q - p)).sum()
    for divergence, name in ((forward, "k2"), (backward, "k3")):
        (slope,) = torch.autograd.grad(divergence, s, retain_graph=True)
        close(slope, expected_gradient(name, s.detach(), q))


def test_the_bound_of_best_of_n() -> None:
    assert best_of_kl_bound(1) == 0.0
    assert best_of_kl_bound(2) == pytest.approx(math.log(2) - 1 / 2)
    assert best_of_kl_bound(8) == pytest.approx(math.log(8) - 7 / 8)


def test_best_of_two_scores() -> None:
    """Of two responses, both fail with probability 1/4: KL(Bernoulli(3/4) || Bernoulli(1/2))."""
    kl = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert best_of_kl([0.0, 1.0], 2) == pytest.approx(kl)
    assert best_of_kl([1.0, 0.0, 0.0, 1.0], 2) == pytest.approx(kl)
    unequal = 0.75**3  # all three have the score that three of four responses have
    expected = unequal * math.log(unequal / 0.75) + (1 - unequal) * math.log((1 - unequal) / 0.25)
    assert best_of_kl([5.0, 5.0, 7.0, 5.0], 3) == pytest.approx(expected)


def test_equal_scores_and_a_single_response_leave_the_policy() -> None:
    assert best_of_kl([0.5] * 8, 8) == 0.0
    assert best_of_kl([0.1, 0.2, 0.3], 1) == pytest.approx(0.0)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_it_tends_to_the_bound_and_stays_below(n: int) -> None:
    draw = random.Random(n)
    bound = best_of_kl_bound(n)
    assert best_of_kl(range(100_000), n) == pytest.approx(bound, abs=1e-2 * bound)
    for count in (n, 3 * n):
        assert 0 < best_of_kl([draw.random() for _ in range(count)], n) < bound
