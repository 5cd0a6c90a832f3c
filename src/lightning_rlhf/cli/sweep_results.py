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
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn
from rich import get_console

from lightning_rlhf.cli.job_result import JobResult, command_line, result_of
from lightning_rlhf.cli.secrecy import without_secrets
from lightning_rlhf.cli.sweep import without_trial
from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.io.storage import full_disk_told, written_whole
from lightning_rlhf.io.visible import visible
from lightning_rlhf.stages.console import print_error, print_line
from lightning_rlhf.stages.folder.folders import is_used
from lightning_rlhf.stages.process import STOPPED

if TYPE_CHECKING:
    from lightning_rlhf.report.run_page import TextTable
    from lightning_rlhf.report.tables import SweepRow

PAGE = "compare.html"
"""Name of the page that compares the jobs, in the folder of the sweep."""
PREFIX = ".sweep-"
"""Start of the name of a folder of results; the host and the number of its process follow."""


class SweepResults:
    """Results of the jobs of a sweep, in a folder that is deleted at its end."""

    def __init__(self, sweep: Path) -> None:
        """Make the folder, below that of the sweep; delete those of sweeps that were killed."""
        sweep.mkdir(parents=True, exist_ok=True)
        delete_left(sweep)
        self.sweep = sweep
        self.process = os.getpid()
        prefix = f"{PREFIX}{socket.gethostname()}-{self.process}-"
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=sweep.absolute()))

    def start(self, number: int, overrides: Sequence[str]) -> None:
        """Record that a job is running, in this process."""
        self.write(
            number,
            JobResult(
                overrides=overrides, status="running", process=os.getpid(),
                host=socket.gethostname(),
            ),
        )  # fmt: skip

    def end(self, number: int, job_return: JobReturn) -> None:
        """Record the result of a job."""
        self.write(number, result_of(job_return))

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
        from lightning_rlhf.report.tables import sweep_table  # which imports torch

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
        if results:
            get_console().print(sweep_table([row(result) for result in results]))
        is_compared = self.has_compared(results)
        failed = [result for result in results if result.status in ("failed", "ended")]
        for result in failed:
            print_line(f"failed: {result.text}: {result.failure}")
            if result.command:
                print_line(f"  alone: {command_line(result)}")
        if stopped is not None:
            print_line("stopped; the same command goes on")
            sys.exit(128 + stopped)
        if problem is None and (failed or not is_compared):
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
        """Write the page that compares the jobs, where one of them has begun to train."""
        begun = {Path(r.folder): r.stage for r in results if r.folder and is_used(Path(r.folder))}
        if not begun:
            return
        from lightning_rlhf.stages.compare import compare_runs  # which imports torch

        stage = "ppo" if "ppo" in begun.values() else next(iter(begun.values()))
        found = compare_runs(list(begun), stage, fewest=1)
        page = self.sweep / PAGE
        with full_disk_told(), written_whole(page) as beside:
            found.write(beside, f"sweep {self.sweep}", jobs_table(results))
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


def row(result: JobResult) -> SweepRow:
    """Return a job as a row of the table on the terminal."""
    from lightning_rlhf.report.tables import SweepRow

    shown = {name: result.metrics[name] for name in result.summary if name in result.metrics}
    words = without_trial(result.overrides)
    return SweepRow(overrides=tuple(words), status=result.status, metrics=shown)


def jobs_table(results: Sequence[JobResult]) -> TextTable:
    """Return the table of all jobs on the page."""
    from lightning_rlhf.report.run_page import TextTable

    return TextTable(
        title="Jobs",
        heading=["job", "status", "why", "command that runs it alone"],
        rows=[
            [result.text, result.status, result.failure or "",
             command_line(result) if result.failure and result.command else ""]
            for result in results
        ],
        note="",
    )  # fmt: skip
