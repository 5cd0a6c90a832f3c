"""Inverse-CDF sampling against the definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.rollout.generate import sample

LARGEST = 1 - 2**-24
"""torch.rand's largest number in fp32."""


@pytest.mark.parametrize(
    ("uniform", "token"),
    # Probabilities 0, 1/4, 0, 1/2, 1/4, 0: the sum exceeds u first at
    # token 1 for u < 1/4, at token 3 for u < 3/4, at token 4 for u < 1.
    [(0.0, 1), (0.2, 1), (0.24999, 1), (0.25001, 3), (0.5, 3), (0.74999, 3), (0.75001, 4),
     (0.9, 4), (LARGEST, 4)],
)  # fmt: skip
def test_the_first_token_whose_cumulative_probability_exceeds_the_number(
    uniform: float, token: int
) -> None:
    logprobs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).log()
    assert sample(logprobs[None], torch.tensor([uniform])).tolist() == [token]


def test_rows_are_independent() -> None:
    logprobs = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]).log()
    assert sample(logprobs, torch.tensor([0.7, 0.2, 0.99])).tolist() == [1, 1, 0]


@given(st.data())
def test_it_is_the_definition_on_any_dyadic_distribution(data: st.DataObject) -> None:
    """Multiples of 1/64 add up without rounding; odd multiples of 1/128 lie between them."""
    counts = data.draw(st.lists(st.integers(0, 64), min_size=1, max_size=20))
    shares, left = [], 64
    for count in counts:
        shares.append(min(count, left))
        left -= shares[-1]
    shares.append(left)
    k = data.draw(st.integers(0, 63))
    token = next(i for i in range(len(shares)) if sum(shares[: i + 1]) > k + 0.5)
    logprobs = torch.tensor([shares], dtype=torch.float32).div(64).log()
    assert sample(logprobs, torch.tensor([(2 * k + 1) / 128])).tolist() == [token]


@given(
    st.lists(st.one_of(st.just(-math.inf), st.floats(-30, 5)), min_size=1, max_size=50),
    st.one_of(st.floats(0, LARGEST, width=32), st.sampled_from([0.0, LARGEST, 2**-24])),
)
def test_a_token_of_probability_zero_is_never_chosen(logits: list[float], uniform: float) -> None:
    logits = [*logits, 0.0, -math.inf]
    logprobs = torch.log_softmax(torch.tensor([logits]), dim=-1)
    token = int(sample(logprobs, torch.tensor([uniform])))
    assert logprobs[0, token].exp() > 0


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_rounding_over_a_large_vocabulary_reaches_no_impossible_token(uniform: float) -> None:
    """The fp32 sum of 150,000 probabilities is 1 only to about 1e-5."""
    logits = torch.randn(4, 151_936, generator=torch.Generator().manual_seed(0))
    logits[:, 151_000:] = -math.inf
    logits[:, :3] = -math.inf
    tokens = sample(torch.log_softmax(logits, dim=-1), torch.full((4,), uniform))
    assert tokens.min() >= 3
    assert tokens.max() < 151_000
