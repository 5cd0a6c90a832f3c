"""Floating-point operations of the layers of a model, by the formulas of `models.flops`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lightning_rlhf.kernels.layers import MAX_CHUNK
from lightning_rlhf.kernels.lora import merging_pays

LIBRARY_CHUNK = 64
"""Tokens of a chunk of the library's linear attention."""


@dataclass(frozen=True)
class Rows:
    """Rows of tokens that a model reads in one pass or several."""

    lengths: Int[Tensor, " B"]
    """Number of positions of each row."""
    wanted: int
    """Number of positions whose hidden states are used, over all rows."""
    passes: int = 1
    """Number of forward passes into which the rows are split."""

    @property
    def count(self) -> int:
        """Return the number of positions."""
        return int(self.lengths.sum())


@dataclass(frozen=True)
class Matrix:
    """A linear layer with its adapters."""

    inputs: int
    outputs: int
    frozen_ranks: tuple[int, ...]
    """Ranks of the active adapters that are not trained."""
    trained_ranks: tuple[int, ...]
    """Ranks of the active adapters that are trained."""
    is_trained: bool
    """True if the weight itself is trained."""
    needs_input: bool
    """True if the gradient of the input is needed."""
    wanted_only: bool
    """True if only the wanted positions are computed."""

    @property
    def learns(self) -> bool:
        """Return whether a gradient reaches the layer's output."""
        return bool(self.needs_input or self.is_trained or self.trained_ranks)

    def forward(self, n: int, passes: int, *, merges: bool) -> float:
        """Return the operations of a forward pass; merges: whether kernels may add adapters."""
        return 2.0 * self.inputs * self.outputs * n + self._adapters(n, passes, merges=merges)

    def backward(self, n: int, passes: int, *, merges: bool) -> float:
        """Return the operations of the backward pass."""
        both = self.inputs + self.outputs
        whole = 2.0 * self.inputs * self.outputs * n * (self.needs_input + self.is_trained)
        found = whole + 4.0 * sum(self.trained_ranks) * both * n
        if self.needs_input and not self._merged(n, passes, merges=merges):
            found += 2.0 * sum(self.frozen_ranks) * both * n
        return found

    def _adapters(self, n: int, passes: int, *, merges: bool) -> float:
        ranks = sum(self.frozen_ranks + self.trained_ranks)
        if self._merged(n, passes, merges=merges):
            return 2.0 * ranks * self.inputs * self.outputs * passes
        return 2.0 * ranks * (self.inputs + self.outputs) * n

    def _merged(self, n: int, passes: int, *, merges: bool) -> bool:
        return merges and merging_pays(n / passes, self.inputs, self.outputs)


@dataclass(frozen=True)
class Attention:
    """Softmax attention of one decoder layer."""

    width: int
    """Number of query heads times their size."""
    learns: bool
    """True if a gradient flows through it."""

    def forward(self, lengths: Int[Tensor, " B"]) -> float:
        """Return the operations of the rows: the products with keys and with values."""
        return 4.0 * self.width * float((lengths.double() ** 2).sum())

    def step(self, contexts: float, tokens: int) -> float:
        """Return the operations of single tokens, which read so many positions in all."""
        return 4.0 * self.width * contexts


@dataclass(frozen=True)
class DeltaRule:
    """Linear attention of one decoder layer by the gated delta rule, in chunks of C tokens.

    For h heads with keys of size k and values of size v, and a convolution of w taps over c
    channels, a token takes 2 h (2 C k + C v + 3 k v) + 2 c w operations; chunks are computed whole.
    """

    heads: int
    key: int
    value: int
    taps: int
    """Channels of the convolution times its taps."""
    learns: bool
    """True if a gradient flows through it."""
    short_chunks: bool
    """True if rows are split into equal chunks of at most MAX_CHUNK tokens."""

    def forward(self, lengths: Int[Tensor, " B"]) -> float:
        """Return the operations of the rows."""
        n = lengths.double()
        if self.short_chunks:
            chunks = (n / MAX_CHUNK).ceil()
            chunk = (n / chunks).ceil()
        else:
            chunks = (n / LIBRARY_CHUNK).ceil()
            chunk = torch.full_like(n, LIBRARY_CHUNK)
        computed = chunks * chunk
        token = chunk * (2 * self.key + self.value) + 3 * self.key * self.value
        return float((2.0 * self.heads * token * computed + 2.0 * self.taps * n).sum())

    def step(self, contexts: float, tokens: int) -> float:
        """Return the operations of single tokens: a state is read by the key and the query."""
        return 4.0 * self.heads * self.key * self.value * tokens
