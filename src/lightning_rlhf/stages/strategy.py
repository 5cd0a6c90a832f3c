"""Lightning's strategy for a run in several processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import DDPStrategy

from lightning_rlhf.parallel.replicas import ended_processes
from lightning_rlhf.parallel.world import World, world

TIMEOUT = timedelta(days=1)
"""Longest time that a process waits for the others, which may judge, score over HTTP or write
files. A process that ends is noticed at once."""


class ReplicaStrategy(DDPStrategy):
    """Strategy for processes whose modules sum the gradients themselves."""

    def configure_ddp(self) -> None:
        """Leave the module unwrapped."""

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for no process, since the first one alone writes checkpoints."""

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Return as Lightning does; raises ProcessEndedError where another process has ended."""
        with ended_processes():
            return super().reduce(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """Return as Lightning does; raises as `reduce`."""
        with ended_processes():
            return super().broadcast(*args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Return as Lightning does; raises as `reduce`."""
        with ended_processes():
            return super().all_gather(*args, **kwargs)


def strategy() -> ReplicaStrategy:
    """Return the strategy of a Trainer in one of several processes."""
    return ReplicaStrategy(cluster_environment=cluster(world()), timeout=TIMEOUT)


def cluster(place: World) -> ClusterEnvironment:
    """Return Lightning's description of the program that started the processes."""
    if place.launcher == "srun":
        return SLURMEnvironment(auto_requeue=False)
    return TorchElasticEnvironment()
