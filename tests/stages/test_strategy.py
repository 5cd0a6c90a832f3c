"""Lightning's own collective operations, where another process of the run has ended."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.core.errors import ProcessEndedError
from lightning_rlhf.parallel.replicas import Replicas
from lightning_rlhf.runs.accelerator import ReplicaStrategy

from ..matrix import matrix
from ..processes import replicated


@pytest.mark.parametrize("operation", matrix(["reduce", "broadcast", "all_gather"], "reduce"))
def test_a_process_that_ends_ends_the_others(operation: str, tmp_path: Path) -> None:
    def work(replicas: Replicas) -> Any:
        torch.distributed.barrier()  # all have met
        if replicas.rank == 0:
            raise ValueError
        return getattr(ReplicaStrategy(), operation)(torch.ones(3))

    found = replicated(2, work, tmp_path)
    assert [type(error) for error in found] == [ValueError, ProcessEndedError]
