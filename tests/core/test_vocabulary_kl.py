"""KL over the whole vocabulary against the slow sum in float64, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_rlhf.core import logprobs as logprobs_file
from lightning_rlhf.core.kl import k1, k3
from lightning_rlhf.core.logprobs import token_logprobs, vocabulary_kl

from .conftest import close, drawn

# Computed in fp32: the terms of the sum carry about 1e-7 each of a few tens of nats.
FP32 = {"rtol": 1e-5, "atol": 2e-5}


class Case:
    """`rows` pairs of hidden states of width 5, a head to `vocabulary` tokens."""

    def __init__(self, rows: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocabulary = vocabulary
        self.hidden, self.ref = torch.randn(2, rows, 5, generator=generator)
        self.weight = torch.randn(vocabulary, 5, generator=generator)
        self.weighting = torch.randn(rows, generator=generator)

    def ours(self, temperature: float) -> tuple[Tensor, ...]:
        """The KL and the gradients of a weighted sum, in both hidden states and in the head."""
        leaves = [x.clone().requires_grad_() for x in (self.hidden, self.ref, self.weight)]
        hidden, ref, weight = leaves
        kl = vocabulary_kl(
            hidden,
            ref,
            lambda h: h @ weight.T,
            temperature=temperature,
            vocab_size=self.vocabulary,
        )
        (kl * self.weighting).sum().backward()
        return kl.detach(), *(x.grad for x in leaves)

    def slow(self, temperature: float) -> tuple[Tensor, ...]:
        """The same in float64, one token of the vocabulary at a time."""
        leaves = [x.double().requires_grad_() for x in (self.hidden, self.ref, self.weight)]
        hidden, ref, weight = leaves
        p = torch.softmax(hidden @ weight.T / temperature, dim=-1)
        q = torch.softmax(ref @ weight.T / temperature, dim=-1)
        kl = sum(
            (p[:, v] * (p[:, v] / q[:, v]).log() for v in range(self.vocabulary)),
            torch.zeros(len(p), dtype=torch.float64),
        )
        (kl * self.weighting).sum().backward()
        return tuple(x.float() for x in (kl.detach(), *(leaf.grad for leaf in leaves)))


@drawn
@given(
    rows=st.integers(1, 9),
    vocabulary=st.integers(2, 11),
    seed=st.integers(0, 999),
    elements=st.integers(1, 120),
    temperature=st.floats(0.5, 3),
)
def test_values_and_gradients_are_those_of_the_slow_sum(
    rows: int, vocabulary: int, seed: int, elements: int, temperature: float
) -> None:
    case = Case(rows, vocabulary, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_file, "CHUNK_ELEMENTS", elements)
        for found, expected in zip(case.ours(temperature), case.slow(temperature), strict=True):
            close(found, expected, **FP32)


def test_by_hand() -> None:
    # Logits (0, ln 3) are p = (1/4, 3/4), logits (0, 0) are q = (1/2, 1/2):
    #   KL(p || q) = 1/4 ln 1/2 + 3/4 ln 3/2,  KL(q || p) = 1/2 ln 2 + 1/2 ln 2/3
    # At temperature 1/2 the first are (1/10, 9/10): 1/10 ln 1/5 + 9/10 ln 9/5.
    p, q = torch.tensor([[0.0, math.log(3)]]), torch.zeros(1, 2)
    forward = math.log(1 / 2) / 4 + 3 / 4 * math.log(3 / 2)
    backward = (math.log(2) + math.log(2 / 3)) / 2
    colder = math.log(1 / 5) / 10 + 9 / 10 * math.log(9 / 5)
    for first, second, temperature, expected in (
        (p, q, 1.0, forward), (q, p, 1.0, backward), (p, q, 0.5, colder)
    ):  # fmt: skip
        found = vocabulary_kl(first, second, nn.Identity(), temperature=temperature, vocab_size=2)
        close(found, torch.tensor([expected]), rtol=1e-6)


@drawn
@given(st.integers(1, 5), st.integers(2, 9), st.integers(0, 999), st.floats(0.5, 3))
def test_it_is_what_the_estimators_estimate(
    rows: int, vocabulary: int, seed: int, temperature: float
) -> None:
    case = Case(rows, vocabulary, seed)

    def every_token(hidden: Tensor) -> Tensor:
        """log p of every token of the vocabulary after every row, [rows, vocabulary]."""
        targets = torch.arange(vocabulary).repeat(rows)
        logprobs, _ = token_logprobs(
            hidden.repeat_interleave(vocabulary, dim=0), targets, lambda h: h @ case.weight.T,
            temperature=temperature, vocab_size=vocabulary,
        )  # fmt: skip
        return logprobs.view(rows, vocabulary).double()

    kl = case.ours(temperature)[0]
    p, q = every_token(case.hidden), every_token(case.ref)
    for estimator in (k1, k3):
        close((p.exp() * estimator(p, q)).sum(-1).float(), kl, **FP32)
    assert (kl > -1e-5).all()


def test_a_policy_that_is_the_reference_is_at_no_distance() -> None:
    case = Case(rows=4, vocabulary=9, seed=0)
    case.ref = case.hidden
    kl, slope, *_ = case.ours(1.0)
    assert torch.equal(kl, torch.zeros(4))
    close(slope, torch.zeros_like(slope), atol=1e-6)


@pytest.mark.parametrize(
    ("elements", "sizes"),
    [(1, [1, 1, 1, 1, 1]), (14, [1, 1, 1, 1, 1]), (28, [2, 2, 1]), (41, [2, 2, 1]), (99, [5])],
)
def test_no_more_logits_than_allowed_are_alive(
    monkeypatch: pytest.MonkeyPatch, elements: int, sizes: list[int]
) -> None:
    # 5 rows, vocabulary 7, logits of both models: elements // 14 rows a chunk.
    monkeypatch.setattr(logprobs_file, "CHUNK_ELEMENTS", elements)
    case, seen = Case(rows=5, vocabulary=7, seed=0), []

    def head(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return hidden @ case.weight.T

    hidden = case.hidden.clone().requires_grad_()
    kl = vocabulary_kl(hidden, case.ref, head, temperature=1.0, vocab_size=7)
    assert seen == [size for size in sizes for _ in ("policy", "reference")]
    kl.sum().backward()
    # Several chunks: the backward pass asks the head again instead of having kept their logits.
    assert sorted(seen) == sorted(sizes * (4 if len(sizes) > 1 else 2))


def test_16_bit_hidden_states_give_an_fp32_kl_and_no_tokens_none() -> None:
    case = Case(rows=4, vocabulary=8, seed=2)
    hidden, ref, weight = (x.bfloat16() for x in (case.hidden, case.ref, case.weight))
    found = vocabulary_kl(hidden, ref, lambda h: h @ weight.T, temperature=1.0, vocab_size=8)
    # The logits are rounded to 16 bits, what follows is not.
    p, q = (torch.log_softmax((h @ weight.T).double(), dim=-1) for h in (hidden, ref))
    close(found, (p.exp() * (p - q)).sum(-1).float(), **FP32)
    none = vocabulary_kl(
        torch.zeros(0, 4), torch.zeros(0, 4), nn.Identity(), temperature=1.0, vocab_size=4
    )
    assert none.shape == (0,)
