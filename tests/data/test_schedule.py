"""Batch k is a pure function of (seed, k), and every example has its turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.data.batches import Schedule


def schedule(
    lengths: list[int], batch_size: int, *, batches: int = 8, seed: int = 0, pool_batches: int = 1
) -> Schedule:
    return Schedule(
        lengths=lengths, batch_size=batch_size, batches=batches, seed=seed,
        pool_batches=pool_batches,
    )  # fmt: skip


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
    longer = schedule(lengths, size, batches=batches + 3, seed=seed, pool_batches=pool)
    assert list(longer)[:batches] == whole
    assert len(resumed) == len(whole) == batches


@given(LENGTHS, SIZES, SEEDS, POOLS)
def test_every_epoch_is_each_example_once(
    lengths: list[int], size: int, seed: int, pool: int
) -> None:
    rows = len(lengths)
    batches = list(schedule(lengths, size, batches=3 * rows, seed=seed, pool_batches=pool))
    assert all(len(batch) == size for batch in batches)
    stream = [example for batch in batches for example in batch]
    for epoch in range(3):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


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


def test_batches_on_the_border_of_two_epochs_stay_as_they_come() -> None:
    # Epochs of 10 in batches of 4: batch 2 holds places 8 to 12, of both epochs; batches 3 and 4
    # are the inside of the second epoch, sorted and cut anew.
    lengths = list(range(10))
    pooled, plain = (list(schedule(lengths, 4, batches=5, pool_batches=p)) for p in (9, 1))
    assert pooled[2] == plain[2]
    assert {*pooled[3], *pooled[4]} == {*plain[3], *plain[4]}
    one, other = sorted([sorted(pooled[3]), sorted(pooled[4])])
    assert max(one) < min(other)
