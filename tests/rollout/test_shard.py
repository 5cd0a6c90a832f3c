"""Batches divided among processes."""

from itertools import chain

import pytest
import torch

from lightning_rlhf.core.records import Prompts
from lightning_rlhf.parallel.replicas import Replicas
from lightning_rlhf.rollout.collector import shard


def batch(rows: int) -> Prompts:
    """Prompts of which each has one token more than the one before."""
    mask = torch.ones(rows, 3 + rows, dtype=torch.bool).triu().flip(1)
    return Prompts(tokens=mask.long(), mask=mask, index=torch.arange(rows))


def numbers(rank: int, size: int, *, divides: bool) -> list[list[int]]:
    """Numbers of the responses that a process samples of 3, 3 and 2 prompts, 2 to each."""
    replicas = Replicas()
    replicas.rank, replicas.size = rank, size
    shards = shard([(batch(rows), 2) for rows in (3, 3, 2)], replicas, divides=divides)
    return [part.numbers.tolist() for part in shards]


def test_the_last_batch_is_divided() -> None:
    """Of its two prompts the longer one goes to the second process."""
    assert numbers(0, 2, divides=True) == [[0, 1, 2, 3, 4, 5], [], [14, 15]]
    assert numbers(1, 2, divides=True) == [[], [6, 7, 8, 9, 10, 11], [12, 13]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("divides", [True, False])
def test_every_response_is_sampled_once(size: int, divides: bool) -> None:
    shares = [chain(*numbers(rank, size, divides=divides)) for rank in range(size)]
    assert sorted(chain(*shares)) == list(range(16))
