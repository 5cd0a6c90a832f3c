"""Chunked log-probabilities, and KL over the whole vocabulary, against float64 and slow sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_rlhf.core import logprobs as logprobs_file
from lightning_rlhf.core.logprobs import token_logprobs, vocabulary_kl

from .conftest import close, drawn

# The functions compute in fp32 whatever they are given: log-probabilities of a few nats carry about
# 1e-7 of each, sums over the vocabulary a few times that.
FP32 = {"rtol": 1e-5, "atol": 2e-6}
KL_FP32 = {"rtol": 1e-5, "atol": 2e-5}
SIZES = {
    "rows": st.integers(1, 9), "vocabulary": st.integers(2, 11), "seed": st.integers(0, 999),
    "elements": st.integers(1, 60), "temperature": st.floats(0.3, 3),
}  # fmt: skip


class Case:
    """`rows` pairs of hidden states of width 5, a head to `vocabulary` tokens, and targets."""

    def __init__(self, rows: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocabulary = vocabulary
        self.hidden, self.ref = torch.randn(2, rows, 5, generator=generator)
        self.weight = torch.randn(vocabulary, 5, generator=generator)
        self.targets = torch.randint(vocabulary, (rows,), generator=generator)
        self.weighting = torch.randn(2, rows, generator=generator)

    def ours(self, temperature: float, *, frozen_head: bool = False) -> list[Tensor]:
        """Log-probabilities, entropy, and the gradients of a weighted sum of both.

        With frozen_head the entropy has no weight, and the gradient is that in the hidden states.
        """
        hidden = self.hidden.clone().requires_grad_()
        weight = self.weight.clone().requires_grad_(not frozen_head)
        logprobs, entropy = token_logprobs(
            hidden, self.targets, lambda h: h @ weight.T,
            temperature=temperature, vocab_size=self.vocabulary, frozen_head=frozen_head,
        )  # fmt: skip
        total = (logprobs * self.weighting[0]).sum()
        if not frozen_head:
            total = total + (entropy * self.weighting[1]).sum()
        total.backward()
        found = [logprobs.detach(), entropy.detach(), hidden.grad]
        return found if frozen_head else [*found, weight.grad]

    def slow(self, temperature: float) -> list[Tensor]:
        """The same in float64, one token at a time, from all logits."""
        hidden = self.hidden.double().requires_grad_()
        weight = self.weight.double().requires_grad_()
        table = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
        logprobs = torch.stack([row[t] for row, t in zip(table, self.targets, strict=True)])
        entropy = torch.stack([-sum(p.exp() * p for p in row) for row in table])
        (logprobs * self.weighting[0] + entropy * self.weighting[1]).sum().backward()
        found = logprobs.detach(), entropy.detach(), hidden.grad, weight.grad
        return [x.float() for x in found]

    def kl(self, compute: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The KL, and the gradients of a weighted sum in both hidden states and in the head."""
        leaves = [
            x.to(dtype, copy=True).requires_grad_() for x in (self.hidden, self.ref, self.weight)
        ]
        kl = compute(*leaves)
        (kl * self.weighting[0]).sum().backward()
        return [x.float() for x in (kl.detach(), *(leaf.grad for leaf in leaves))]


@pytest.fixture
def chunk(monkeypatch: pytest.MonkeyPatch):
    return lambda elements: monkeypatch.setattr(logprobs_file, "CHUNK_ELEMENTS", elements)


@pytest.mark.parametrize("frozen_head", [False, True])
@drawn
@given(**SIZES)
def test_values_and_gradients_are_those_of_the_full_table(
    rows: int, vocabulary: int, seed: int, elements: int, temperature: float, *, frozen_head: bool
) -> None:
    case = Case(rows, vocabulary, seed)
    case.weighting[1] *= not frozen_head
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_file, "CHUNK_ELEMENTS", elements)
        found = case.ours(temperature, frozen_head=frozen_head)
    for x, expected in zip(found, case.slow(temperature), strict=False):
        close(x, expected, **FP32)


def test_by_hand() -> None:
    # Logits (0, ln 3): probabilities 1/4, 3/4; entropy 1/4 ln 4 + 3/4 ln 4/3.
    # At temperature 1/2 they are (0, 2 ln 3): 1/10, 9/10.
    logits = torch.tensor([[0.0, math.log(3)]] * 2)
    targets = torch.tensor([0, 1])
    logprobs, entropy = token_logprobs(logits, targets, nn.Identity(), temperature=1, vocab_size=2)
    close(logprobs, torch.tensor([1 / 4, 3 / 4]).log(), rtol=1e-6)
    expected = math.log(4) / 4 + 3 / 4 * math.log(4 / 3)
    close(entropy, torch.tensor([expected, expected]), rtol=1e-6)
    colder, _ = token_logprobs(logits, targets, nn.Identity(), temperature=0.5, vocab_size=2)
    close(colder, torch.tensor([1 / 10, 9 / 10]).log(), rtol=1e-6)


def test_a_certain_distribution_has_entropy_zero_and_not_nan() -> None:
    # exp(-1000) is 0 in fp32; 0 * -1000 must count as 0.
    logits = torch.tensor([[0.0, -1000.0, -1000.0]])
    logprobs, entropy = token_logprobs(
        logits, torch.tensor([1]), nn.Identity(), temperature=1.0, vocab_size=3
    )
    assert entropy.item() == 0
    assert logprobs.item() == -1000


@pytest.mark.parametrize("frozen_head", [False, True])
def test_autocast_lowers_neither_numbers_nor_gradients(*, frozen_head: bool) -> None:
    """As trainer=gpu runs it: bf16 in the head's matrix product, fp32 in everything after."""
    logits = 3 * torch.randn(4, 5000, generator=torch.Generator().manual_seed(3))
    found = []
    for enabled in (False, True):
        hidden = logits.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logprobs, entropy = token_logprobs(
                hidden, torch.arange(4), nn.Identity(), temperature=1.0, vocab_size=5000,
                frozen_head=frozen_head,
            )  # fmt: skip
        (logprobs if frozen_head else logprobs + entropy).sum().backward()
        found.append((logprobs, entropy, hidden.grad))
    for plain, cast in zip(*found, strict=True):
        assert torch.equal(plain, cast)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_what_all_logits_have_in_common_costs_no_digits(temperature: float) -> None:
    """fp32 is 6e-5 apart at 1000; the numbers are those of the logits as they are rounded.

    The head returns what it was given, which must not change.
    """
    logits = 1000 + 3 * torch.randn(6, 50, generator=torch.Generator().manual_seed(5))
    targets, before = torch.arange(6), logits.clone()
    table = torch.log_softmax(logits.double() / temperature, dim=-1)
    expected = table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1)
    for learns in (False, True):
        found = token_logprobs(
            logits.requires_grad_(learns), targets, nn.Identity(), temperature=temperature,
            vocab_size=50, frozen_head=True,
        )  # fmt: skip
        assert [x.requires_grad for x in found] == [learns, False]
        assert torch.equal(logits, before)
        for x, exact in zip(found, expected, strict=True):
            close(x.detach(), exact.float(), **FP32)


def test_a_model_of_16_bits() -> None:
    """Logits and gradient are rounded to 16 bits, 8 binary digits; what is between is not."""
    case = Case(rows=6, vocabulary=8, seed=2)
    case.hidden, case.weight = case.hidden.bfloat16(), case.weight.bfloat16()
    logprobs, _, gradient = case.ours(1.0, frozen_head=True)
    assert (logprobs.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    close(logprobs, case.ours(1.0)[0], **FP32)
    case.hidden, case.weight, case.weighting[1] = case.hidden.float(), case.weight.float(), 0
    expected = case.slow(1.0)[2]
    assert (gradient.float() - expected).norm() < 2**-7 * expected.norm()


@pytest.mark.parametrize("elements", [1, 20])
def test_a_few_rows_at_a_time_have_the_same_bits(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(rows=5, vocabulary=8, seed=1)
    whole = case.ours(0.7, frozen_head=True)
    monkeypatch.setattr(logprobs_file, "CACHED_ELEMENTS", elements)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with patch.object(torch, "softmax", wraps=torch.softmax) as asked:
        found = case.ours(0.7, frozen_head=True)
    assert asked.call_count == -(-5 // max(1, elements // 8))
    assert all(torch.equal(x, expected) for x, expected in zip(found, whole, strict=True))


@pytest.mark.parametrize(
    ("dtype", "row_multiple", "elements", "rows"),
    # 70 rows of 8 logits: of few shapes 2 x 64, or 20 at a time and as many of the last 10.
    [
        (torch.bfloat16, 64, 10**6, [128]),
        (torch.float32, 64, 160, [20, 20, 20, 20]),
        (torch.float32, 1, 160, [20, 20, 20, 10]),
    ],
)
def test_products_that_are_compiled_for_a_shape_have_few(
    dtype: torch.dtype, row_multiple: int, elements: int, rows: list[int], chunk
) -> None:
    case, seen = Case(rows=70, vocabulary=8, seed=1), []
    hidden, weight = case.hidden.to(dtype).requires_grad_(), case.weight.to(dtype)

    def head(h: Tensor) -> Tensor:
        seen.append(len(h))
        return h @ weight.T

    def both(row_multiple: int, *, frozen_head: bool) -> list[Tensor]:
        found = token_logprobs(
            hidden, case.targets, head, temperature=1.0, vocab_size=8,
            frozen_head=frozen_head, row_multiple=row_multiple,
        )  # fmt: skip
        (gradient,) = torch.autograd.grad((found[0] * case.weighting[0]).sum(), hidden)
        return [*found, gradient.float()]

    plain = both(1, frozen_head=False)
    chunk(elements)
    for frozen_head in (True, False):
        seen.clear()
        found = both(row_multiple, frozen_head=frozen_head)
        again = 1 if frozen_head or len(rows) == 1 else 2  # for the gradient
        assert sorted(seen) == sorted(rows * again)
        for x, expected in zip(found[:2], plain[:2], strict=True):
            close(x.detach(), expected.detach(), **FP32)
        assert (found[2] - plain[2]).norm() < 2**-7 * plain[2].norm()
        seen.clear()
        kl = vocabulary_kl(
            hidden, 2 * hidden, head, head, temperature=1.0, vocab_size=4, row_multiple=row_multiple
        )
        assert seen[::2] == rows
        assert kl.shape == (70,)


def test_without_gradients_none_is_computed() -> None:
    """Even of hidden states that require one; the logits stand in no graph."""
    hidden, seen = torch.randn(3, 4).requires_grad_(), []

    def head(h: Tensor) -> Tensor:
        logits = h * 2
        seen.append(logits.requires_grad)
        return logits

    for h, context in ((hidden, torch.no_grad()), (hidden.detach(), torch.enable_grad())):
        with context:
            logprobs, _ = token_logprobs(
                h, torch.tensor([0, 1, 2]), head, temperature=1.0, vocab_size=4, frozen_head=True
            )
        assert not logprobs.requires_grad
    assert seen == [False, False]


@drawn
@given(**SIZES | {"elements": st.integers(1, 120), "temperature": st.floats(0.5, 3)})
def test_kl_and_gradients_are_those_of_the_slow_sum(
    rows: int, vocabulary: int, seed: int, elements: int, temperature: float
) -> None:
    case = Case(rows, vocabulary, seed)

    def ours(hidden: Tensor, ref: Tensor, weight: Tensor) -> Tensor:
        return vocabulary_kl(
            hidden, ref, lambda h: h @ weight.T, lambda h: h @ weight.flip(0).T,
            temperature=temperature, vocab_size=vocabulary,
        )  # fmt: skip

    def slow(hidden: Tensor, ref: Tensor, weight: Tensor) -> Tensor:
        """In float64, one token of the vocabulary at a time."""
        logits = hidden @ weight.T, ref @ weight.flip(0).T
        p, q = (torch.softmax(x / temperature, dim=-1) for x in logits)
        terms = [p[:, v] * (p[:, v] / q[:, v]).log() for v in range(vocabulary)]
        return torch.stack(terms).sum(dim=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_file, "CHUNK_ELEMENTS", elements)
        found = case.kl(ours, torch.float32)
    for x, expected in zip(found, case.kl(slow, torch.float64), strict=True):
        close(x, expected, **KL_FP32)


def test_kl_by_hand() -> None:
    # Logits (0, ln 3) are p = (1/4, 3/4), logits (0, 0) are q = (1/2, 1/2):
    #   KL(p || q) = 1/4 ln 1/2 + 3/4 ln 3/2,  KL(q || p) = 1/2 ln 2 + 1/2 ln 2/3
    # At temperature 1/2 the first are (1/10, 9/10): 1/10 ln 1/5 + 9/10 ln 9/5.
    p, q = torch.tensor([[0.0, math.log(3)]]), torch.zeros(1, 2)
    forward = math.log(1 / 2) / 4 + 3 / 4 * math.log(3 / 2)
    backward = (math.log(2) + math.log(2 / 3)) / 2
    colder = math.log(1 / 5) / 10 + 9 / 10 * math.log(9 / 5)
    head = nn.Identity()
    for first, second, temperature, expected in (
        (p, q, 1.0, forward), (q, p, 1.0, backward), (p, q, 0.5, colder)
    ):  # fmt: skip
        found = vocabulary_kl(first, second, head, head, temperature=temperature, vocab_size=2)
        close(found, torch.tensor([expected]), rtol=1e-6)


def test_16_bit_hidden_states_give_an_fp32_kl_and_no_tokens_none() -> None:
    case = Case(rows=4, vocabulary=8, seed=2)
    hidden, ref, weight = (x.bfloat16() for x in (case.hidden, case.ref, case.weight))
    heads = [lambda h: h @ weight.T] * 2
    found = vocabulary_kl(hidden, ref, *heads, temperature=1.0, vocab_size=8)
    # The logits are rounded to 16 bits, what follows is not.
    p, q = (torch.log_softmax((h @ weight.T).double(), dim=-1) for h in (hidden, ref))
    close(found, (p.exp() * (p - q)).sum(-1).float(), **KL_FP32)
    none, head = torch.zeros(0, 4), nn.Identity()
    kl = vocabulary_kl(none, none, head, head, temperature=1.0, vocab_size=4)
    assert kl.shape == (0,)
