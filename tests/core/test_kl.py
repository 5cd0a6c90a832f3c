"""Estimators against the divergence, best-of-n against closed forms, and the coefficient of KL."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.core.kl import (
    ESTIMATORS,
    TokenLogprobs,
    absolute,
    adapted_coef,
    best_of_kl,
    best_of_kl_bound,
    k1,
    k2,
    k3,
    next_kl_coef,
)

from .configs import ppo_config
from .conftest import close, drawn

LN2 = math.log(2)


def doubles(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def logits(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(2 * torch.randn(size, generator=generator, dtype=torch.float64), -1)


def estimate(name: str, p: Tensor, q: Tensor, old: Tensor | None = None) -> Tensor:
    old = p.detach() if old is None else old
    return ESTIMATORS[name](TokenLogprobs(logprobs=p, old_logprobs=old, ref_logprobs=q))


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
    squared = (LN2**2 / 2, LN2**2 / 2)
    expected = {"k1": (LN2, -LN2), "k2": squared, "k3": (LN2 - 0.5, 1 - LN2), "abs": (LN2, LN2),
                "mse": squared}  # fmt: skip
    for name, values in expected.items():
        close(estimate(name, p, q), doubles(*values))


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
    # Equal scores and a single response leave the policy.
    assert best_of_kl([0.5] * 8, 8) == 0.0
    assert best_of_kl([0.1, 0.2, 0.3], 1) == pytest.approx(0.0)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_it_tends_to_the_bound_and_stays_below(n: int) -> None:
    draw = random.Random(n)
    bound = best_of_kl_bound(n)
    assert best_of_kl(range(100_000), n) == pytest.approx(bound, abs=1e-2 * bound)
    for count in (n, 3 * n):
        assert 0 < best_of_kl([draw.random() for _ in range(count)], n) < bound


# Target 6, half a horizon of episodes: a coefficient of 0.2 changes by 0.2 * clip(error) / 2.
@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.2),  # at the target
        (5.4, 0.19),  # a tenth below
        (6.6, 0.21),  # a tenth above: half of a tenth dearer
        (7.2, 0.22),  # a fifth above, the most that counts
        (60.0, 0.22),
        (-3.0, 0.18),  # an estimate can be negative
    ],
)
def test_adapted_by_hand(kl: float, expected: float) -> None:
    found = adapted_coef(0.2, kl, target=6.0, horizon=100.0, episodes=50)
    assert found == pytest.approx(expected, rel=1e-12)


def test_at_its_target_the_coefficient_stays_to_the_last_bit() -> None:
    assert adapted_coef(0.1, 0.3, target=0.3, horizon=7.0, episodes=11) == 0.1


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0.4, 0.1, [0.4, 0.3, 0.2, 0.1]), (0.0, 3.0, [0, 1, 2, 3]), (0.2, 0.2, [0.2] * 4)],
)
def test_linear_by_hand(start: float, end: float, expected: list[float]) -> None:
    config = ppo_config(kl_coef=start, kl_control="linear", kl_coef_end=end, iterations=4)
    found = [next_kl_coef(start, torch.zeros(1, 1), config, iteration=i) for i in range(3)]
    assert [start, *found] == pytest.approx(expected, rel=1e-12)


def test_a_run_of_one_iteration_divides_by_no_step() -> None:
    config = ppo_config(kl_coef=0.4, kl_control="linear", kl_coef_end=0.1, iterations=1)
    assert next_kl_coef(0.4, torch.zeros(1, 1), config, iteration=0) == pytest.approx(0.1)
