"""Lines on the terminal about the jobs of a sweep that run in processes of their own."""

from __future__ import annotations

import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from lightning_rlhf.cli.job_result import JobResult, log_of
from lightning_rlhf.cli.overrides import key_of
from lightning_rlhf.cli.sweep_results import SweepResults
from lightning_rlhf.rewards.prefixes import short_name
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.process import STOPPED

POLL_S = 1.0
"""Seconds between two readings of the results."""


class SweepProgress(threading.Thread):
    """Thread that prints a line for each job that begins, and one for each that ends."""

    def __init__(self, results: SweepResults, varied: Collection[str]) -> None:
        """Set up the thread. varied: keys in which the jobs differ."""
        super().__init__(daemon=True)
        self.results, self.varied = results, varied
        self.printed: dict[int, set[bool]] = {}
        """Number of a job -> whether it was running, for each line that was printed of it."""
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(POLL_S):
            with suppress(OSError):  # of a network file system; it is read again
                self.print_new()

    def stop(self) -> None:
        """Print what is left, and end."""
        self.ended.set()
        self.join()
        self.print_new()

    def print_new(self) -> None:
        """Print a line for each job of this command that has begun or ended since the last call."""
        for number, result in self.results.read().items():
            is_running, printed = result.status == "running", self.printed.setdefault(number, set())
            is_known = result.process != 0 and not (is_running and result.folder is None)
            if is_known and is_running not in printed:
                printed.add(is_running)
                print_line(f"#{number} {self.line(result)}")

    def line(self, result: JobResult) -> str:
        """Return what a job that has begun or ended is, its metrics, and where its output is."""
        words = [word for word in result.overrides if key_of(word) in self.varied]
        status = {"running": "begins", "done": "ended"}.get(result.status, result.status)
        parts = [f"{status}: {' '.join(words) or result.text}"]
        if shown := [name for name in result.summary if name in result.metrics]:
            parts.append(", ".join(f"{short_name(n)} {result.metrics[n]:z.3f}" for n in shown))
        if result.failure not in (None, STOPPED):  # it names the file of the output
            parts.append(str(result.failure))
        elif result.folder is not None:
            parts.append(f"its output is in {log_of(Path(result.folder))}")
        return "; ".join(parts)
