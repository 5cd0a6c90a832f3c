"""Minibatches: every row once an epoch, in an order of its own, whitened on its own."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from lightning_rlhf.core.experience import minibatches, whitened
from lightning_rlhf.core.records import Experience

from .configs import ppo_config
from .conftest import NAN, F, T, close
from .rollouts import by_hand, make


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
    parts = minibatches(ten_rows(), ppo_epochs, size, generator)
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
