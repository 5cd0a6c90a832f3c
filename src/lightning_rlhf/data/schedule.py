"""Which examples meet in which batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

_EPOCH, _POOL = 0, 1  # two streams of random numbers that share nothing


class Schedule(Sampler[list[int]]):
    """The batches of a whole run; batch k is a pure function of (seed, k).

    Endless epochs, each all examples once in an order of its own, are laid end to end and cut
    into batches: batch k holds the places k * batch_size to (k + 1) * batch_size. So every
    batch is full, nothing is dropped, and a batch may span the border of two epochs, or many
    epochs where it is larger than the data.

    With `pool_batches` > 1 so many consecutive batches of an epoch share their examples: sorted
    by length and cut into batches anew; then all batches of the epoch are shuffled. Alike
    lengths need little padding, which is the price of a batch of mixed lengths. 1 leaves the
    examples where they are. The batches on the border of two epochs take no part.
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
        self.lengths = np.asarray(lengths)
        self.batch_size = batch_size
        self.batches = batches
        self.seed = seed
        self.pool_batches = pool_batches
        self.start = 0
        """The first batch to yield: 0, or the one after the last that was trained on."""
        self._latest: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """Batches of the whole run, those before `start` included, as Lightning counts them."""
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        return (self.batch(k) for k in range(self.start, self.batches))

    def batch(self, k: int) -> list[int]:
        """Positions of the examples in batch k."""
        size = len(self.lengths)
        first, end = k * self.batch_size, (k + 1) * self.batch_size
        found: list[int] = []
        for epoch in range(first // size, -(-end // size)):
            if self._latest is None or self._latest[0] != epoch:
                self._latest = epoch, self._order(epoch)
            order = self._latest[1]
            found += order[max(0, first - epoch * size) : end - epoch * size].tolist()
        return found

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """All examples once, in the order of this epoch."""
        order = self._random(_EPOCH, epoch).permutation(len(self.lengths))
        start = -epoch * len(order) % self.batch_size  # after the batch begun in the epoch before
        whole = (len(order) - start) // self.batch_size
        if self.pool_batches == 1 or whole < 1:
            return order
        inner = slice(start, start + whole * self.batch_size)
        pool = np.arange(whole * self.batch_size) // (self.pool_batches * self.batch_size)
        by_length = np.lexsort((self.lengths[order[inner]], pool))
        batches = order[inner][by_length].reshape(whole, self.batch_size)
        order[inner] = self._random(_POOL, epoch).permutation(batches).ravel()
        return order

    def _random(self, stream: int, index: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, stream, index))
