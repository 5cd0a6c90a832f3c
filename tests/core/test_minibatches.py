"""Minibatches: every row once an epoch, in an order of its own, whitened on its own."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given

from lightning_rlhf.core.experience import minibatches, whitened
from lightning_rlhf.core.records import Experience

from .configs import ppo_config
from .conftest import NAN, F, Ragged, T, close, drawn, ragged
from .rollouts import by_hand, drawn_rollout, make


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


def test_whitened_by_hand() -> None:
    # Advantages 5/2, 5/2, -4 (see test_experience.py) are in units of their deviation about their
    # mean (1/sqrt 2, 1/sqrt 2, -sqrt 2). What stands on padding is not read.
    config = ppo_config(gae_lambda=1.0, whiten_advantages="minibatch",
                        missing_eos="subtract", missing_eos_penalty=2.0)  # fmt: skip
    rollout, scores = by_hand()
    experience = make(rollout, scores, config, 0.5)
    assert experience.advantages.tolist() == [[2.5, 2.5], [-4, 0]]
    filled = experience.advantages.masked_fill(torch.tensor([[F, F], [F, T]]), NAN)
    found = whitened(replace(experience, advantages=filled))
    half = 0.5**0.5
    expected = torch.tensor([[half, half], [-2 * half, 0.0]], dtype=torch.float64)
    close(found.advantages, expected, rtol=1e-8)
    assert experience.advantages.tolist() == [[2.5, 2.5], [-4, 0]]


@drawn
@given(ragged())
def test_whitened_changes_advantages_only(batch: Ragged) -> None:
    rollout, scores = drawn_rollout(batch)
    config = ppo_config(whiten_advantages="minibatch")
    experience = make(rollout, scores, config, 0.1)
    found, mask = whitened(experience), batch.mask
    for field in fields(found):
        if field.name != "advantages":
            assert getattr(found, field.name) is getattr(experience, field.name)
    variance = experience.advantages[mask].var(correction=0)
    close(found.advantages[mask].mean(), torch.zeros((), dtype=torch.float64), atol=1e-9)
    close(found.advantages[mask].var(correction=0), variance / (variance + 1e-8), rtol=1e-7)
    assert (found.advantages[~mask] == 0).all()
