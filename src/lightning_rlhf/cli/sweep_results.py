"""Results of a sweep's jobs: a file for each, and the table and the page at the end.

A launcher may run a job in a process of its own, or on another machine; what a job leaves are files
in a folder that both see.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType

from hydra.core.utils import JobReturn
from rich import get_console
from rich.console import Console

from lightning_rlhf.cli.job_result import JobResult, command_line, result_of
from lightning_rlhf.cli.secrecy import without_secrets
from lightning_rlhf.cli.sweep import whole_name
from lightning_rlhf.cli.sweep_page import PAGE, rank, row, write_page
from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.io.visible import visible
from lightning_rlhf.stages.console import print_error, print_line
from lightning_rlhf.stages.process import STOPPED

PREFIX = ".sweep-"
"""Start of the name of a folder of results; the host and the number of its process follow."""


class SweepResults:
    """Results of the jobs of a sweep, in a folder that is deleted at its end."""

    def __init__(self, sweep: Path, words: Sequence[str] = ()) -> None:
        """Make the folder, below that of the sweep; delete those of sweeps that were killed.

        words: overrides of the sweep.
        """
        sweep.mkdir(parents=True, exist_ok=True)
        delete_left(sweep)
        self.sweep = sweep
        self.words = words
        self.name = whole_name(words)
        """Name of the sweep among those of the run; None where it has no overrides."""
        self.goal: tuple[str, Mode] | None = None
        """Metric of a study, by which the jobs are sorted, with its direction."""
        self.process = os.getpid()
        prefix = f"{PREFIX}{socket.gethostname()}-{self.process}-"
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=sweep.absolute()))

    def start(self, number: int, overrides: Sequence[str], folder: str | None = None) -> None:
        """Record that a job is running, in this process.

        folder: folder of its run; None where it is not known yet.
        """
        self.write_own(number, JobResult(overrides=overrides, status="running", folder=folder))

    def end(self, number: int, job_return: JobReturn) -> None:
        """Record the result of a job."""
        self.write_own(number, result_of(job_return))

    def write_own(self, number: int, result: JobResult) -> None:
        """Write what is known of a job of this process."""
        own = replace(result, process=os.getpid(), host=socket.gethostname())
        self.write(number, own)

    def write(self, number: int, result: JobResult) -> None:
        """Write what is known of a job, as one file whatever reads it meanwhile."""
        with written_whole(self.folder / f"{number:06d}.json") as beside:
            beside.write_text(json.dumps(asdict(result)))

    def read(self) -> dict[int, JobResult]:
        """Return the results by the number of the job."""
        files = sorted(self.folder.glob("*.json"))
        return {int(file.stem): JobResult(**json.loads(file.read_text())) for file in files}

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal has ended the sweep: no further job is to begin."""
        return self.stop_file.exists()

    @property
    def stop_file(self) -> Path:
        """Return the path of the file with the number of the signal that has ended the sweep."""
        return self.folder / "stopped"

    def end_early(self, signum: int) -> None:
        """Keep further jobs from beginning, after a signal."""
        self.stop_file.write_text(str(signum))

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """End the sweep after a signal: running jobs of this machine write a checkpoint and end."""
        signal.signal(signum, signal.SIG_DFL)
        os.write(2, b"\nending the jobs, with a checkpoint each; a second signal ends at once\n")
        self.end_early(signum)
        for result in self.read().values():
            if result.status == "running" and result.host == socket.gethostname():
                with suppress(ProcessLookupError):
                    os.kill(result.process, signal.SIGTERM)

    def show(self, problem: str | None = None) -> None:
        """Print the table and the failed jobs, and write the page.

        problem: why the launcher gave up, if it did; the caller prints it. Exits with a status
        other than 0 where a job failed, the page was not written or the sweep was stopped.
        """
        from lightning_rlhf.report.tables import WIDEST, sweep_table  # which imports torch

        results = [
            replace(found, status="ended", failure=problem or "it ended without a result")
            if found.status == "running"
            else found
            for found in self.read().values()
        ]
        stopped = None
        if self.is_stopped:
            stopped = int(self.stop_file.read_text())
        elif any(result.status == STOPPED for result in results):  # by a signal to that job alone
            stopped = signal.SIGTERM
        if self.goal is not None:
            results.sort(key=partial(rank, self.goal), reverse=True)
        if results:
            console = get_console()
            if not console.is_terminal:
                console = Console(width=WIDEST)
            table = sweep_table([row(result) for result in results], console.width)
            console.print(table, crop=False)
        is_compared = self.has_compared(results)
        failed = [result for result in results if result.status in ("failed", "ended")]
        for result in failed:
            print_line(f"failed: {result.text}: {result.failure}")
            if result.command:
                print_line(f"  alone: {command_line(result)}")
        if stopped is not None:
            print_line("stopped; the same command goes on")
            sys.exit(128 + stopped)
        if problem is None and not results:
            print_error("a key of the sweep has no value, so that it has no job; allowed: one or "
                        "more, as range(START,STOP) with START below STOP has")  # fmt: skip
        if problem is None and (failed or not is_compared or not results):
            sys.exit(1)

    def delete(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def has_compared(self, results: Sequence[JobResult]) -> bool:
        """Write the page that compares the jobs; return False where an error prevents it."""
        try:
            self.compare(results)
        except RLHFError as error:
            print_error(f"no comparison: {error}")
            return False
        except Exception as error:  # the failed jobs are still to be listed
            print(visible(without_secrets(traceback.format_exc())), file=sys.stderr, end="")
            print_error(f"no comparison: {type(error).__name__}: {without_secrets(str(error))}")
            return False
        return True

    def compare(self, results: Sequence[JobResult]) -> None:
        """Write the page that compares the jobs, and a copy that no other sweep replaces."""
        page = self.sweep / PAGE
        copy = None if self.name is None else page.with_stem(f"{page.stem}_{self.name}")
        title = " ".join([f"Sweep {self.sweep}:", *self.words])
        if write_page(title, page, copy, results, self.goal):
            print_line(f"comparison: {page}")


def delete_left(sweep: Path) -> None:
    """Delete the folders of results of processes of this machine that have been killed."""
    for folder in sweep.glob(f"{PREFIX}{socket.gethostname()}-*-*"):
        try:
            os.kill(int(folder.name.split("-")[-2]), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:  # the process of another user
            continue
