"""Replicas: a process group with the same weights in every process and a share of each batch."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, distributed, nn
from torch.distributed.rendezvous import rendezvous

from lightning_rlhf.core import errors, records
from lightning_rlhf.parallel.world import World

R = TypeVar("R", bound=records.Record)
T = TypeVar("T")
BUCKET = 2**24
"""Largest number of elements that are copied and summed at once, unless a gradient is larger: 64
MiB in fp32."""


@contextmanager
def ended_processes() -> Iterator[None]:
    """Raise ProcessEndedError where a collective operation fails as another process has ended."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise errors.ProcessEndedError from error


arrivals: list[Callable[[], None]] = []
"""Functions that are called before each collective operation."""


@contextmanager
def collective() -> Iterator[None]:
    """Enter a collective operation, which raises ProcessEndedError as `ended_processes` does."""
    for arrive in arrivals:
        arrive()
    with ended_processes():
        yield


class Replicas:
    """The processes of a run, of which each computes some rows of every batch.

    Every process holds the whole batch before and after a step, so that whitening, running moments,
    controllers, random orders and metrics are those of a single process, for which all operations
    return what they are given.
    """

    rank = 0
    """Number of this process, from 0."""
    size = 1
    """Number of processes."""
    device = torch.device("cpu")
    """Device that this process computes on."""

    @property
    def is_first(self) -> bool:
        """Return whether this process writes the files and the output of the run."""
        return self.rank == 0

    @property
    def rows(self) -> slice:
        """Return the rows of a batch that this process computes: every `size`-th of them."""
        return slice(self.rank, None, self.size)

    def share(self, order: Int[Tensor, " B"]) -> Int[Tensor, " M"]:
        """Return the numbers of the rows that this process computes, ascending.

        order: all numbers in the order in which they are dealt out, such as by length.
        """
        return order[self.rows].sort().values

    def first(self, work: Callable[[], T]) -> T:
        """Return what `work`, called in the first process alone, returned there, in every process.

        Raises: in every process, what it raised.
        """
        found: Any = self.gather(lambda: work() if self.is_first else None)[0]
        return found

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Return what `work` returned in each process, in their order.

        Raises: in every process, what it raised in one of them.
        """
        if self.size == 1:
            return [work()]
        try:
            local: tuple[T | None, errors.RLHFError | None] = work(), None
        except (errors.InterruptedPassError, errors.ProcessEndedError):
            raise  # other processes wait within the pass, and not here, or have ended
        except errors.RLHFError as error:
            local = None, error
        found: list[Any] = [None] * self.size
        with collective():
            distributed.all_gather_object(found, local)
        raised = [error for _, error in found if error is not None]
        if raised:
            raise raised[0] if local[1] is None else local[1]
        return [result for result, _ in found]

    def joined(self, rows: Int[Tensor, " M"], work: Callable[[Int[Tensor, " M"]], R]) -> R:
        """Return the records of all processes as one, in the order of the row numbers.

        rows: numbers of the rows of the record that `work(rows)` returns here; `work` is not
            called without rows.
        """
        if self.size == 1:
            return work(rows)
        shares = self.gather(lambda: (rows.cpu(), work(rows).to("cpu")) if len(rows) else None)
        parts = [share for share in shares if share is not None]
        order = torch.cat([numbers for numbers, _ in parts]).argsort()
        whole = type(parts[0][1]).joined([record for _, record in parts])
        return whole.select(order).to(self.device)

    def merged(self, numbers: Int[Tensor, " M"], items: Iterable[T]) -> list[T]:
        """Return the items of all processes as one list, in the order of their numbers.

        numbers: number of each item of this process.
        """
        local = list(zip(numbers.tolist(), items, strict=True))
        pairs = [pair for part in self.gather(lambda: local) for pair in part]
        return [item for _, item in sorted(pairs, key=lambda pair: pair[0])]

    def sum(self, tensor: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Return the sum of a tensor over the processes."""
        if self.size > 1:
            tensor = tensor.clone()
            with collective():
                distributed.all_reduce(tensor)
        return tensor

    def sum_gradients(
        self, parameters: Iterable[nn.Parameter], numbers: Float[Tensor, " n"]
    ) -> Float[Tensor, "size n"]:
        """Replace each gradient by its sum over the processes.

        A missing gradient counts as 0, and remains missing where no process has it: an optimizer
        leaves out a parameter without a gradient, but not one whose gradient is 0.

        Returns: the numbers of each process, in their order, from the same exchange.
        """
        if self.size == 1:
            return numbers[None]
        parameters = [*parameters]
        table = numbers.new_zeros(self.size, len(numbers))
        table[self.rank] = numbers  # the other rows are 0 here, so that sums are those numbers
        owners = numbers.new_tensor([p.grad is not None for p in parameters])
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in buckets([*(p.grad for p in parameters if p.grad is not None), table, owners]):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            with collective():
                distributed.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        for parameter, count in zip(parameters, owners.tolist(), strict=True):
            if not count:
                parameter.grad = None
        return table

    def largest(self, number: int) -> int:
        """Return the largest of the numbers that the processes give."""
        if self.size == 1:
            return number
        found = torch.tensor(number, device=self.device)
        with collective():
            distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return int(found)


ONE = Replicas()
"""The replicas of a run in a single process."""


def current(device: torch.device) -> Replicas:
    """Return the replicas of the initialised process group, or those of a single process.

    device: device that this process computes on.
    """
    found = Replicas()
    if distributed.is_available() and distributed.is_initialized():
        found.rank, found.size = distributed.get_rank(), distributed.get_world_size()
    found.device = device
    return found


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in lists of at most BUCKET elements each and of one type each."""
    bucket: list[Tensor] = []
    count = 0
    for tensor in tensors:
        is_full = count + tensor.numel() > BUCKET
        if bucket and (is_full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, count = [], 0
        bucket.append(tensor)
        count += tensor.numel()
    if bucket:
        yield bucket


MESSAGE = "lightning_rlhf_error"
"""Key of the message in the store of the process group."""
_stores: list[distributed.Store] = []
"""Store of the process group, once this process has joined it."""


def join_group(
    place: World, device: torch.device, backend: str, method: str, timeout: timedelta
) -> Replicas:
    """Join the process group; return its replicas.

    Args:
        place: place of this process in it.
        device: device that this process computes on.
        backend: backend of torch.distributed.
        method: address at which the processes meet, an `init_method` of torch.distributed.
        timeout: longest time that a process waits for the others.

    Raises ConfigError where the processes do not meet, as where the port is taken.
    """
    try:
        store, rank, size = next(rendezvous(method, place.rank, place.size))
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timeout
        )
    except distributed.DistError as error:
        raise errors.ConfigError(
            f"process {place.rank} of {place.size} cannot meet the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
            f"({errors.first_line(error)}); allowed: MASTER_ADDR, a machine that all reach, and "
            "MASTER_PORT, a free port of it"
        ) from error
    _stores.append(store)
    return current(device)


def leave_message(message: str) -> None:
    """Leave the reason why this process ends, for the first process to print."""
    with suppress(RuntimeError):  # the first process has ended, and its store with it
        for store in _stores:
            store.set(MESSAGE, message)


def message_left() -> str | None:
    """Return the reason that another process left; None where there is none."""
    try:
        return next((s.get(MESSAGE).decode() for s in _stores if s.check([MESSAGE])), None)
    except RuntimeError:
        return None
