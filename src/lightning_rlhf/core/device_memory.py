"""The memory of a device, and micro-batches that fit into it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from lightning_rlhf.core.errors import TrainingError

T = TypeVar("T")


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory that the device has, in use or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class MicrobatchSize:
    """Number of rows that go through a model at once, halved where the device's memory runs out."""

    def __init__(self, key: str, rows: int) -> None:
        """key: key of the configuration that holds `rows`."""
        self.key = key
        self.rows = rows

    def fitting(self, work: Callable[[int], T]) -> T:
        """Return `work(rows)`, repeated with half of the rows as long as the memory runs out.

        Each halving is warned of once. `work` starts anew each time and must leave nothing behind
        where it fails.

        Raises: TrainingError where one row is too many.
        """
        while True:
            rows = self.rows
            try:
                return work(rows)
            except torch.OutOfMemoryError as error:
                if rows == 1:
                    raise TrainingError(
                        f"one row at a time ({self.key}) is too much for the memory of the device: "
                        f"{error} Shorter prompts and responses, a smaller model or a quantised "
                        "one need less"
                    ) from error
            # Only behind the handler are the tensors of the failed pass gone.
            torch.cuda.empty_cache()
            if self.rows < rows:  # work that shares this size has halved it already
                continue
            self.rows //= 2
            warnings.warn(
                f"out of memory: {self.key} is {self.rows} from now on, which changes no result",
                stacklevel=2,
            )
