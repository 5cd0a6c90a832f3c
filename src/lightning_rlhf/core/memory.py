"""The memory of a device, and the size of micro-batches that fit into it."""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from lightning_rlhf.core.errors import TrainingError

T = TypeVar("T")


def total_memory(device: torch.device) -> int:
    """Return the total memory of the device in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory(device: torch.device) -> int:
    """Return the memory of the device that new tensors of this process can take, in bytes.

    On a GPU it includes what torch holds and does not use. On a CPU it is what Linux calls
    available, within the limit of the process's control group; elsewhere the machine's memory.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    found, info = total_memory(device), Path("/proc/meminfo")
    if info.exists() and (line := re.search(r"MemAvailable: +(\d+) kB", info.read_text())):
        found = int(line[1]) * 1024
    return min(found, left_in_group(Path("/sys/fs/cgroup"), found))


def left_in_group(group: Path, found: int) -> int:
    """Return the bytes that the limit of a control group (version 2) leaves; `found` without one.

    Cached files that were not read lately count as free, as the system drops them first.
    """
    limit = group / "memory.max"
    if not limit.exists() or (bound := limit.read_text().strip()) == "max":
        return found
    files = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
    used = int((group / "memory.current").read_text()) - (int(files[1]) if files else 0)
    return int(bound) - used


class MicrobatchSize:
    """Number of rows in one forward pass, halved where the device runs out of memory."""

    def __init__(self, key: str, rows: int) -> None:
        """Set the initial number of rows; key: configuration key that holds `rows`."""
        self.key = key
        self.rows = rows

    def fitting(self, work: Callable[[int], T]) -> T:
        """Return `work(rows)`, repeated with half of the rows as long as the memory runs out.

        `work` must have no effect where it fails. Raises TrainingError where one row is too many.
        """
        while True:
            with self.halving():
                return work(self.rows)
            torch.cuda.empty_cache()  # what the failed block held is free only now

    @contextmanager
    def halving(self) -> Iterator[None]:
        """End the block where it runs out of memory, and halve the rows, with one warning.

        The caller repeats the block, whose tensors are free only after it. Raises TrainingError
        where one row is too many.
        """
        rows = self.rows
        try:
            yield
        except torch.OutOfMemoryError as error:
            if rows == 1:
                raise TrainingError(
                    f"one row at a time ({self.key}) is too much for the memory of the device: "
                    f"{error} Shorter prompts and responses, or a smaller model, need less"
                ) from error
            if self.rows == rows:  # other work with this object has not halved it
                self.rows //= 2
                change = f"{self.key} is {self.rows} from now on, which changes no result"
                warnings.warn(f"out of memory: {change}", stacklevel=3)
