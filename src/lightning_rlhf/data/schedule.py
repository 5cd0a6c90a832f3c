"""Assignment of training examples to batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

_EPOCH, _POOL = 0, 1  # two independent streams of random numbers


class Schedule(Sampler[list[int]]):
    """Batch sampler for a whole run; batch k is a pure function of (seed, k).

    An endless sequence of epochs, each with all examples once in an order of its own, is cut into
    batches: batch k holds the positions k * batch_size to (k + 1) * batch_size. So every batch is
    full, no example is dropped, and a batch may span two epochs, or many if it is larger than the
    data.

    With `pool_batches` > 1, that many consecutive batches of an epoch pool their examples, which
    are sorted by length and divided into batches again; then all batches of the epoch are shuffled.
    A batch of similar lengths needs less padding than one of mixed lengths. 1 leaves the examples
    where they are. Batches that span two epochs are not pooled.
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
        """Set up the schedule to start with batch 0.

        Args:
            lengths: length of each example, tokens.
            batch_size: number of examples in a batch.
            batches: number of batches in the whole run.
            seed: seed of the orders, >= 0.
            pool_batches: number of consecutive batches in a pool, >= 1.
        """
        self.lengths = np.asarray(lengths)
        self.batch_size = batch_size
        self.batches = batches
        self.seed = seed
        self.pool_batches = pool_batches
        self.start = 0
        """Index of the first batch to yield: 0, or the one after the last that was trained on."""
        self._latest: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """Return the number of batches in the whole run, including those before `start`.

        Lightning counts the batches of a resumed run from the beginning.
        """
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        return (self.batch(k) for k in range(self.start, self.batches))

    def batch(self, k: int) -> list[int]:
        """Return the positions of the examples in batch k."""
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
        """Return the positions of all examples in the order of this epoch."""
        order = self._random(_EPOCH, epoch).permutation(len(self.lengths))
        start = -epoch * len(order) % self.batch_size  # after the previous epoch's last batch
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
