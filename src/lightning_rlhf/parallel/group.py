"""The process group of a run, and the message that a process leaves where it fails."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from lightning_rlhf.core.errors import ConfigError, first_line
from lightning_rlhf.parallel.replicas import Replicas, current
from lightning_rlhf.parallel.world import World

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
        raise ConfigError(
            f"process {place.rank} of {place.size} cannot meet the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} ({first_line(error)}); "
            "allowed: MASTER_ADDR, a machine that all reach, and MASTER_PORT, a free port of it"
        ) from error
    _stores.append(store)
    return current(device)


def leave_message(message: str) -> None:
    """Leave the reason why this process ends, for the first process to print."""
    try:
        for store in _stores:
            store.set(MESSAGE, message)
    except RuntimeError:  # the first process has ended, and its store with it
        pass


def message_left() -> str | None:
    """Return the reason that another process left; None where there is none."""
    try:
        for store in _stores:
            if store.check([MESSAGE]):
                return store.get(MESSAGE).decode()
    except RuntimeError:
        pass
    return None
