"""From a rollout and its scores to rewards, advantages and shuffled minibatches."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.core.experience import make_experience, minibatches
from lightning_rlhf.core.types import Experience, Rollout, Scores

from .configs import ppo_config
from .conftest import NAN, F, Ragged, T, close, drawn, pad, ragged

COMPUTED = ("kl", "rewards", "advantages", "returns")


def by_hand() -> tuple[Rollout, Scores]:
    """Two responses, of 2 and 1 of 2 tokens, after a prompt of one token."""
    rollout = Rollout(
        tokens=torch.tensor([[5, 1, 2], [6, 3, 0]]),
        mask=torch.tensor([[T, T, T], [T, T, F]]),
        response_mask=torch.tensor([[T, T], [T, F]]),
        ended=torch.tensor([T, F]),
        logprobs=torch.tensor([[-1.0, -2.0], [-1.0, 0.0]], dtype=torch.float64),
        values=torch.tensor([[0.5, 1.0], [2.0, 0.0]], dtype=torch.float64),
        index=torch.tensor([7, 3]),
    )
    scores = Scores(
        score=torch.tensor([3.0, 1.0], dtype=torch.float64),
        ref_logprobs=torch.tensor([[-2.0, -1.0], [-3.0, 0.0]], dtype=torch.float64),
    )
    return rollout, scores


def drawn_rollout(batch: Ragged) -> tuple[Rollout, Scores]:
    prompt_mask = torch.ones(len(batch.lengths), 2, dtype=torch.bool)
    tokens = torch.arange(len(batch.lengths) * (2 + batch.width)).view(len(batch.lengths), -1)
    rollout = Rollout(
        tokens=tokens,
        mask=torch.cat([prompt_mask, batch.mask], dim=1),
        response_mask=batch.mask,
        ended=batch.row_normal(0) > 0,
        logprobs=batch.normal(1),
        values=batch.normal(2),
        index=torch.arange(len(batch.lengths)),
    )
    return rollout, Scores(score=batch.row_normal(3), ref_logprobs=batch.normal(4))


def test_by_hand_without_whitening() -> None:
    # kl_coef 1/2, gamma 1, lambda 1, a missing end costs 2 of the score.
    #   kl:      (-1 + 2, -2 + 1) = (1, -1);  (-1 + 3, padding) = (2, 0)
    #   rewards: (-1/2, 1/2 + 3) = (-1/2, 7/2);  (-1 + (1 - 2), 0) = (-2, 0)
    #   returns: (-1/2 + 7/2, 7/2) = (3, 7/2);  (-2, 0)
    #   advantages: returns - values = (5/2, 5/2);  (-4, 0)
    rollout, scores = by_hand()
    config = ppo_config(
        kl_coef=0.5, gamma=1.0, gae_lambda=1.0, whiten_advantages=False,
        missing_eos="subtract", missing_eos_penalty=2.0,
    )  # fmt: skip
    experience = make_experience(rollout, scores, config)
    assert experience.kl.tolist() == [[1, -1], [2, 0]]
    assert experience.rewards.tolist() == [[-0.5, 3.5], [-2, 0]]
    assert experience.returns.tolist() == [[3, 3.5], [-2, 0]]
    assert experience.advantages.tolist() == [[2.5, 2.5], [-4, 0]]
    assert experience.score.tolist() == [3, 1]  # as given, before the rule for a missing end
    assert experience.tokens is rollout.tokens
    assert experience.mask is rollout.mask
    assert experience.response_mask is rollout.response_mask
    assert experience.old_logprobs is rollout.logprobs
    assert experience.old_values is rollout.values
    assert experience.ended is rollout.ended
    assert experience.index is rollout.index


def test_by_hand_with_whitening() -> None:
    # Advantages 5/2, 5/2, -4: mean 1/3, deviations 13/6, 13/6, -13/3,
    # population variance 13^2 (1/36 + 1/36 + 4/36) / 3 = 169/18, deviation 13 / sqrt(18).
    # Whitened: sqrt(18) (1/6, 1/6, -1/3) = (1/sqrt 2, 1/sqrt 2, -sqrt 2). Returns stay.
    rollout, scores = by_hand()
    config = ppo_config(
        kl_coef=0.5, gamma=1.0, gae_lambda=1.0, whiten_advantages=True,
        missing_eos="subtract", missing_eos_penalty=2.0,
    )  # fmt: skip
    experience = make_experience(rollout, scores, config)
    half = math.sqrt(0.5)
    expected = torch.tensor([[half, half], [-2 * half, 0.0]], dtype=torch.float64)
    close(experience.advantages, expected, rtol=1e-8)
    assert experience.returns.tolist() == [[3, 3.5], [-2, 0]]


@drawn
@given(ragged(), st.floats(0, 2), st.sampled_from(["none", "subtract", "replace"]))
def test_rewards_sum_to_score_minus_price_and_returns_start_there(
    batch: Ragged, kl_coef: float, rule: str
) -> None:
    rollout, scores = drawn_rollout(batch)
    config = ppo_config(
        kl_coef=kl_coef, missing_eos=rule, missing_eos_penalty=1.5, gamma=1.0, gae_lambda=1.0
    )
    experience = make_experience(rollout, scores, config)
    worth = {
        "none": scores.score,
        "subtract": scores.score - 1.5 * (~rollout.ended),
        "replace": torch.where(rollout.ended, scores.score, -1.5),
    }[rule]
    kl = torch.stack(
        [
            (rollout.logprobs[i, :n] - scores.ref_logprobs[i, :n]).sum()
            for i, n in enumerate(batch.lengths)
        ]
    )
    close(experience.kl.sum(1), kl)
    close(experience.rewards.sum(1), worth - kl_coef * kl)
    # Undiscounted Monte-Carlo: the return of the first token is the sum of all rewards.
    close(experience.returns[:, 0], experience.rewards.sum(1))


@drawn
@given(ragged(), st.integers(1, 3), st.sampled_from([NAN, float("inf"), 5.0]), st.booleans())
def test_padding_changes_nothing(batch: Ragged, columns: int, filler: float, whiten: bool) -> None:
    rollout, scores = drawn_rollout(batch)
    wide = replace(
        rollout,
        tokens=pad(rollout.tokens, columns, 3),
        mask=pad(rollout.mask, columns, F),
        response_mask=pad(rollout.response_mask, columns, F),
        logprobs=pad(rollout.logprobs, columns, filler),
        values=pad(rollout.values, columns, filler),
    )
    wide_scores = replace(scores, ref_logprobs=pad(scores.ref_logprobs, columns, filler))
    config = ppo_config(whiten_advantages=whiten)
    narrow = make_experience(rollout, scores, config)
    found = make_experience(wide, wide_scores, config)
    for name in COMPUTED:
        close(getattr(found, name), pad(getattr(narrow, name), columns, 0.0))


@drawn
@given(ragged(), st.booleans())
def test_the_order_of_the_rows_does_not_matter(batch: Ragged, whiten: bool) -> None:
    rollout, scores = drawn_rollout(batch)
    order, config = batch.shuffled_rows(), ppo_config(whiten_advantages=whiten)
    whole = make_experience(rollout, scores, config).select(order)
    shuffled = make_experience(rollout.select(order), scores.select(order), config)
    for name in COMPUTED:
        close(getattr(shuffled, name), getattr(whole, name))


@drawn
@given(ragged(), st.integers(1, 3))
def test_unwhitened_parts_are_the_parts_of_the_whole(batch: Ragged, size: int) -> None:
    rollout, scores = drawn_rollout(batch)
    config = ppo_config(whiten_advantages=False)
    whole = make_experience(rollout, scores, config).split(size)
    parts = zip(rollout.split(size), scores.split(size), whole, strict=True)
    for part_rollout, part_scores, expected in parts:
        found = make_experience(part_rollout, part_scores, config)
        for name in COMPUTED:
            assert torch.equal(getattr(found, name), getattr(expected, name))


def ten_rows() -> Experience:
    """Ten rows whose every field holds the row's number."""
    row = torch.arange(10)
    wide, flags = row[:, None].expand(10, 3), (row % 2 == 0)
    numbers = {
        f.name: (row if f.name in ("index", "score") else wide).clone() for f in fields(Experience)
    }
    masks = {"mask": flags[:, None].expand(10, 3), "response_mask": flags[:, None].expand(10, 3)}
    return Experience(**numbers | masks | {"ended": flags})


def epochs_of(seed: int, ppo_epochs: int, size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    parts = minibatches(ten_rows(), ppo_epochs=ppo_epochs, minibatch_size=size, generator=generator)
    return [part.index.tolist() for part in parts]


@pytest.mark.parametrize(("size", "sizes"), [(1, [1] * 10), (5, [5, 5]), (4, [4, 4, 2])])
def test_every_row_once_in_every_epoch(size: int, sizes: list[int]) -> None:
    found = epochs_of(seed=0, ppo_epochs=3, size=size)
    assert [len(part) for part in found] == sizes * 3
    for epoch in range(3):
        part = found[epoch * len(sizes) : (epoch + 1) * len(sizes)]
        assert sorted(row for rows in part for row in rows) == list(range(10))


def test_every_epoch_has_an_order_of_its_own() -> None:
    # 1 in 10! that two of them coincide by chance.
    first, second, third = epochs_of(seed=0, ppo_epochs=3, size=10)
    assert len({tuple(first), tuple(second), tuple(third), tuple(range(10))}) == 4


def test_the_order_is_a_function_of_the_generator_alone() -> None:
    before = torch.get_rng_state()
    assert epochs_of(seed=1, ppo_epochs=2, size=5) == epochs_of(seed=1, ppo_epochs=2, size=5)
    assert epochs_of(seed=1, ppo_epochs=2, size=5) != epochs_of(seed=2, ppo_epochs=2, size=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_fields_of_a_row_stay_together() -> None:
    generator = torch.Generator().manual_seed(0)
    for part in minibatches(ten_rows(), ppo_epochs=2, minibatch_size=3, generator=generator):
        rows = part.index
        for field in fields(part):
            found = getattr(part, field.name)
            expected = (rows % 2 == 0) if found.dtype == torch.bool else rows
            assert torch.equal(found, expected.view(-1, *[1] * (found.ndim - 1)).expand_as(found))
