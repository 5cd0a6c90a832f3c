"""Which examples meet in which batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

_EPOCH, _POOL = 0, 1  # two streams of random numbers that share nothing


class Schedule(Sampler[list[int]]):
    """The batches of a whole run; batch k is a pure function of (seed, k).

    Endless epochs, each all examples once in an order of its own, are laid end to end and cut
    into batches: batch k holds the places k * batch_size to (k + 1) * batch_size. So every
    batch is full, nothing is dropped, and a batch may span the border of two epochs, or many
    epochs where it is larger than the data.

    With `pool_batches` > 1 so many consecutive batches share their examples: sorted by length,
    cut into batches anew, and these shuffled. Alike lengths need little padding, which is the
    price of a batch of mixed lengths. 1 leaves the examples where they are. A pool is never
    larger than an epoch; one that spans two may hold an example twice.
    """

    def __init__(
        self,
        *,
        lengths: Sequence[int],
        batch_size: int,
        batches: int,
        seed: int,
        pool_batches: int,
    ) -> None:
        """`lengths` of the examples in tokens; `batches` of the whole run; `seed` >= 0."""
        self.lengths = lengths
        self.batch_size = batch_size
        self.batches = batches
        self.seed = seed
        self.pool_batches = max(1, min(pool_batches, len(lengths) // batch_size))
        self.start = 0
        """The first batch to yield: 0, or the one after the last that was trained on."""

    def __len__(self) -> int:
        """Batches of the whole run, those before `start` included, as Lightning counts them."""
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        return (self.batch(k) for k in range(self.start, self.batches))

    def batch(self, k: int) -> list[int]:
        """Positions of the examples in batch k."""
        if self.pool_batches == 1:
            return self._places(k * self.batch_size, (k + 1) * self.batch_size)
        pool, place = divmod(k, self.pool_batches)
        size = self.pool_batches * self.batch_size
        examples = self._places(pool * size, (pool + 1) * size)
        examples.sort(key=self.lengths.__getitem__)
        turn = self._random(_POOL, pool).permutation(self.pool_batches)[place]
        return examples[turn * self.batch_size : (turn + 1) * self.batch_size]

    def _places(self, first: int, end: int) -> list[int]:
        """The examples at the places `first` to `end` of the endless epochs."""
        size = len(self.lengths)
        found: list[int] = []
        for epoch in range(first // size, -(-end // size)):
            order = self._random(_EPOCH, epoch).permutation(size)
            found += order[max(0, first - epoch * size) : end - epoch * size].tolist()
        return found

    def _random(self, stream: int, index: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, stream, index))
