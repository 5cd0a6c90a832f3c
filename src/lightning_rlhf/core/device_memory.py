"""The memory of a device, and the size of micro-batches that fit into it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from lightning_rlhf.core.errors import TrainingError

T = TypeVar("T")


def total_memory(device: torch.device) -> int:
    """Return the total memory of the device in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class MicrobatchSize:
    """Number of rows in one forward pass, halved where the device runs out of memory."""

    def __init__(self, key: str, rows: int) -> None:
        """Set the initial number of rows; key: configuration key that holds `rows`."""
        self.key = key
        self.rows = rows

    def fitting(self, work: Callable[[int], T]) -> T:
        """Return `work(rows)`, repeated with half of the rows as long as the memory runs out.

        Each halving prints one warning. `work` must have no effect where it fails.
        Raises TrainingError where one row is too many.
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
            # The tensors of the failed pass are freed only after the handler.
            torch.cuda.empty_cache()
            if self.rows < rows:  # other work with this object has already halved it
                continue
            self.rows //= 2
            warnings.warn(
                f"out of memory: {self.key} is {self.rows} from now on, which changes no result",
                stacklevel=2,
            )
