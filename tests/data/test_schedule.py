"""Batch k is a pure function of (seed, k), and every example has its turn."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.data.schedule import Schedule


def schedule(
    lengths: list[int], batch_size: int, *, batches: int = 8, seed: int = 0, pool_batches: int = 1
) -> Schedule:
    return Schedule(
        lengths=lengths,
        batch_size=batch_size,
        batches=batches,
        seed=seed,
        pool_batches=pool_batches,
    )


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40)
SIZES = st.integers(1, 20)
POOLS = st.integers(1, 6)
SEEDS = st.integers(0, 2**32)


@given(LENGTHS, SIZES, SEEDS, POOLS, st.integers(0, 12), st.data())
def test_any_start_gives_the_tail_of_the_whole_run(
    lengths: list[int], size: int, seed: int, pool: int, batches: int, data: st.DataObject
) -> None:
    whole = list(schedule(lengths, size, batches=batches, seed=seed, pool_batches=pool))
    start = data.draw(st.integers(0, batches))
    resumed = schedule(lengths, size, batches=batches, seed=seed, pool_batches=pool)
    resumed.start = start
    assert list(resumed) == whole[start:]
    assert list(resumed) == whole[start:]  # iterating changes nothing
    assert len(resumed) == len(whole) == batches


@given(LENGTHS, SIZES, SEEDS, POOLS)
def test_a_longer_run_begins_like_a_shorter_one(
    lengths: list[int], size: int, seed: int, pool: int
) -> None:
    short = schedule(lengths, size, batches=5, seed=seed, pool_batches=pool)
    long = schedule(lengths, size, batches=11, seed=seed, pool_batches=pool)
    assert list(islice(long, 5)) == list(short)


@given(LENGTHS, SIZES, SEEDS)
def test_every_epoch_is_each_example_once(lengths: list[int], size: int, seed: int) -> None:
    rows = len(lengths)
    batches = list(schedule(lengths, size, batches=3 * rows, seed=seed))
    assert all(len(batch) == size for batch in batches)
    stream = [example for batch in batches for example in batch]
    for epoch in range(3):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(LENGTHS, SIZES, SEEDS, POOLS)
def test_pools_only_regroup_what_is_in_them(
    lengths: list[int], size: int, seed: int, pool: int
) -> None:
    pooled = schedule(lengths, size, seed=seed, pool_batches=pool)
    width = pooled.pool_batches
    pooled.batches = 3 * width
    plain = schedule(lengths, size, seed=seed, batches=3 * width)
    for first in range(0, 3 * width, width):
        regrouped = Counter(e for k in range(first, first + width) for e in pooled.batch(k))
        assert regrouped == Counter(e for k in range(first, first + width) for e in plain.batch(k))


def test_epochs_and_seeds_differ_in_order() -> None:
    # Two random orders of 50 are equal with probability 1 / 50!.
    first, second = schedule([1] * 50, 50, batches=2)
    (other,) = schedule([1] * 50, 50, batches=1, seed=1)
    assert sorted(first) == sorted(second) == sorted(other)
    assert first != second
    assert first != other
    assert second != other
    assert first != sorted(first)


def test_a_batch_larger_than_the_data_spans_epochs() -> None:
    # 7 places of epochs of 3: two whole epochs and one example of the third.
    (batch,) = schedule([1, 1, 1], 7, batches=1)
    assert sorted(batch[:3]) == sorted(batch[3:6]) == [0, 1, 2]
    assert len(batch) == 7


def test_pools_batch_alike_lengths_and_mix_their_order() -> None:
    # One pool is the whole epoch: 8 batches, the shortest 8 of 64 together, and so on.
    lengths = [64 - i for i in range(64)]
    batches = list(schedule(lengths, 8, pool_batches=8))
    shortest = [min(lengths[e] for e in batch) for batch in batches]
    assert sorted(shortest) == [1, 9, 17, 25, 33, 41, 49, 57]
    assert all(
        sorted(lengths[e] - min(lengths[e] for e in b) for e in b) == list(range(8))
        for b in batches
    )
    assert shortest not in (sorted(shortest), sorted(shortest, reverse=True))


def test_a_pool_is_never_larger_than_an_epoch() -> None:
    # 10 examples hold 2 batches of 4, so pools are of 2 however many are asked for. The first
    # pool lies within the first epoch: no example twice.
    pooled = schedule(list(range(10)), 4, pool_batches=32)
    assert pooled.pool_batches == 2
    assert len({*pooled.batch(0), *pooled.batch(1)}) == 8
    assert schedule([1, 1], 4, pool_batches=32).pool_batches == 1
