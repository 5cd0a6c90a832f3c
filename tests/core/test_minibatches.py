"""Minibatches: every row once an epoch, in an order of its own, whitened on its own."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from lightning_rlhf.core.experience import minibatches
from lightning_rlhf.core.records import Experience


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
