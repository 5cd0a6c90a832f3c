"""Inverse-CDF sampling against the definition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.rollout.sampler import draw_tokens

LARGEST = 1 - 2**-24
"""torch.rand's largest number in fp32."""


def drawn(logits: Tensor, *uniform: float) -> list[int]:
    """The tokens that these numbers draw, one a row."""
    return draw_tokens(logits, torch.tensor(uniform))[0].tolist()


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
    assert drawn(logprobs[None], uniform) == [token]


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
    assert drawn(logprobs, (2 * k + 1) / 128) == [token]


@given(
    st.lists(st.one_of(st.just(-math.inf), st.floats(-30, 5)), min_size=1, max_size=50),
    st.one_of(st.floats(0, LARGEST, width=32), st.sampled_from([0.0, LARGEST, 2**-24])),
)
def test_a_token_of_probability_zero_is_never_chosen(logits: list[float], uniform: float) -> None:
    logits = [*logits, 0.0, -math.inf]
    logprobs = torch.log_softmax(torch.tensor([logits]), dim=-1)
    (token,) = drawn(logprobs, uniform)
    assert logprobs[0, token].exp() > 0


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.49, LARGEST])
def test_a_cumulative_sum_that_falls_and_rises_chooses_no_token_of_probability_zero(
    uniform: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which adds in another order for every term.

    Four tokens of 1/4, each followed by three of probability 0 at which the sum of a block is 2e-3
    higher, lower and higher than it is. 16 tokens are four blocks.
    """
    logprobs = torch.full((1, 16), -math.inf)
    logprobs[0, ::4] = math.log(0.25)
    exact = Tensor.cumsum

    def uneven(x: Tensor, dim: int) -> Tensor:
        return exact(x, dim) + torch.tensor([0.0, 2e-3, -2e-3, 2e-3, 0.0][: x.shape[dim]])

    monkeypatch.setattr(Tensor, "cumsum", uneven)
    (token,) = drawn(logprobs, uniform)
    assert token % 4 == 0


@pytest.mark.parametrize("uniform", [0.0, LARGEST])
def test_rounding_over_a_large_vocabulary_reaches_no_impossible_token(uniform: float) -> None:
    """The fp32 sum of 150,000 probabilities is 1 only to about 1e-5."""
    logits = torch.randn(4, 151_936, generator=torch.Generator().manual_seed(0))
    logits[:, 151_000:] = -math.inf
    logits[:, :3] = -math.inf
    tokens = drawn(logits, *[uniform] * 4)
    assert min(tokens) >= 3
    assert max(tokens) < 151_000


@given(st.integers(1, 200), st.integers(0, 2**31))
def test_it_says_the_log_probability_of_what_it_drew(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(3, size, generator=generator) + 20
    tokens, logprobs = draw_tokens(logits, torch.rand(3, generator=generator))
    expected = torch.log_softmax(logits.double(), dim=-1)[torch.arange(3), tokens]
    torch.testing.assert_close(logprobs, expected.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_a_distribution_says_nan(bad: float) -> None:
    logits = torch.zeros(3, 7)
    logits[1, 4] = bad
    tokens, logprobs = draw_tokens(logits, torch.tensor([0.5, 0.5, 0.5]))
    assert logprobs.isfinite().tolist() == [True, False, True]
    assert tokens.max() < 7
