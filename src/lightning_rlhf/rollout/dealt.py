"""Batches of prompts dealt out among the processes of a run, each with its own random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lightning_rlhf.core.masking import by_length
from lightning_rlhf.core.types import Prompts, SampledResponses
from lightning_rlhf.parallel.replicas import Replicas
from lightning_rlhf.rollout.hf import HFSampler
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import Share


@dataclass(frozen=True, kw_only=True)
class DealtBatch:
    """A batch of prompts, of which this process samples some."""

    prompts: Prompts
    """The whole batch."""
    samples_per_prompt: int
    mine: Int[Tensor, " M"]
    """Rows of the prompts that this process samples; empty where it samples none."""
    first: int
    """Number of the first response of the batch among the responses of all batches."""

    @property
    def share(self) -> Share:
        """Return the place of this process's prompts in the batch."""
        return Share(self.mine, len(self.prompts))

    @property
    def numbers(self) -> Int[Tensor, " R"]:
        """Return the numbers, among the responses of all batches, of those sampled here."""
        return self.first + self.share.responses(self.samples_per_prompt)


def deal(
    batches: Iterable[tuple[Prompts, int]], replicas: Replicas, *, divides: bool
) -> list[DealtBatch]:
    """Return all batches, each with the prompts that this process samples.

    Each process takes every `replicas.size`-th batch. The last ones, fewer than the processes, are
    divided among all of them where `divides`.

    batches: pairs (prompts, samples_per_prompt).
    """
    pairs = list(batches)
    whole = len(pairs) - len(pairs) % replicas.size if divides else len(pairs)
    found, first = [], 0
    for number, (prompts, count) in enumerate(pairs):
        mine = torch.arange(len(prompts) if number % replicas.size == replicas.rank else 0)
        if number >= whole:
            mine = replicas.share(by_length(prompts.mask))
        found.append(DealtBatch(prompts=prompts, samples_per_prompt=count, mine=mine, first=first))
        first += len(prompts) * count
    return found


def count_mine(batches: Sequence[DealtBatch]) -> int:
    """Return the number of responses that this process samples."""
    return sum(len(batch.mine) * batch.samples_per_prompt for batch in batches)


def sample_mine(
    sampler: NativeSampler | HFSampler, batches: Iterable[DealtBatch], generator: torch.Generator
) -> Iterator[tuple[Int[Tensor, " R"], SampledResponses]]:
    """Yield the numbers of the responses that this process samples, with them, batch by batch.

    The random numbers of a response are those that it has in a single process.
    """
    for batch in batches:
        prompts, count = batch.prompts, batch.samples_per_prompt
        if not len(batch.mine):
            sampler.draw(len(prompts) * count, generator)
            continue
        some = prompts.select(batch.mine).to(sampler.roles.device)
        if len(some) == len(prompts):
            yield batch.numbers, sampler.sample(some, count, generator)
        else:
            assert isinstance(sampler, NativeSampler)
            yield batch.numbers, sampler.sample(some, count, generator, batch.share)
