"""Results of a sweep's jobs: a file for each, and the table and the page at the end.

A launcher may run a job in a process of its own, or on another machine; what a job leaves are files
in a folder that both see.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig
from rich import get_console

from lightning_rlhf.cli.messages import program_name
from lightning_rlhf.cli.overrides import key_of, parse_overrides, stage_of
from lightning_rlhf.cli.recipe import own_configs
from lightning_rlhf.cli.sweep import job_folder, job_stage
from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.io.storage import full_disk_told, written_whole
from lightning_rlhf.stages.console import print_error, print_line
from lightning_rlhf.stages.folder.folders import FINAL, is_used
from lightning_rlhf.stages.process import STOPPED
from lightning_rlhf.stages.registry import STAGES

if TYPE_CHECKING:
    from lightning_rlhf.report.run_page import TextTable
    from lightning_rlhf.report.tables import SweepRow

PAGE = "compare.html"
"""Name of the page that compares the jobs, in the folder of the sweep."""
DECIDED = ("job", "resume", "overwrite")
"""Keys that the command of a single job sets itself."""
TRIAL = "callbacks.trial"
"""Key of the callback with which a trial of a study reports; it is no part of a job's name."""


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A job of a sweep: what is known of it before, and after it has ended."""

    overrides: Sequence[str]
    status: str = "ended"
    """"running", "done", "pruned", "stopped", "failed", or "ended" for one that was killed."""
    failure: str | None = None
    """Why it has no result; None for a finished job."""
    folder: str | None = None
    """Folder of the run; None where the job ended before it was known."""
    stage: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics at the end of the run."""
    summary: Sequence[str] = ()
    """Names of the metrics that the table shows."""
    command: Sequence[str] = ()
    """Arguments of the command that runs the job alone."""
    process: int = 0
    """Number of the process in which the job runs."""
    host: str = ""

    @property
    def text(self) -> str:
        """Return the overrides of the job in one line."""
        return " ".join(word for word in self.overrides if not key_of(word).startswith(TRIAL))


class SweepResults:
    """Results of the jobs of a sweep, in a folder that is deleted at its end."""

    def __init__(self, sweep: Path) -> None:
        """Make the folder, below that of the sweep."""
        sweep.mkdir(parents=True, exist_ok=True)
        self.sweep = sweep
        self.process = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix=".sweep-", dir=sweep.absolute()))

    def start(self, number: int, overrides: Sequence[str]) -> None:
        """Note that a job is running, in this process."""
        self.write(
            number,
            JobResult(
                overrides=overrides, status="running", process=os.getpid(),
                host=socket.gethostname(),
            ),
        )  # fmt: skip

    def end(self, number: int, job_return: JobReturn) -> None:
        """Note the result of a job."""
        self.write(number, result_of(job_return))

    def write(self, number: int, result: JobResult) -> None:
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
        return self.folder / "stopped"

    def end_early(self, signum: int) -> None:
        """Let no further job begin, after a signal."""
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
        other than 0 where a job failed or the sweep was stopped.
        """
        from lightning_rlhf.report.tables import sweep_table  # which imports torch

        results = [
            replace(found, status="ended", failure=problem or "it ended without a result")
            if found.status == "running"
            else found
            for found in self.read().values()
        ]
        stopped = int(self.stop_file.read_text()) if self.is_stopped else None
        try:
            if results:
                get_console().print(sweep_table([row(result) for result in results]))
                self.compare(results)
        except RLHFError as error:
            print_error(f"no comparison: {error}")
        failed = [result for result in results if result.status in ("failed", "ended")]
        for result in failed:
            print_line(f"failed: {result.text}: {result.failure}")
            if result.command:
                print_line(f"  alone: {command_line(result)}")
        if stopped is not None:
            print_line("stopped; the same command goes on")
            sys.exit(128 + stopped)
        if failed and problem is None:
            sys.exit(1)

    def delete(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

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


def result_of(job_return: JobReturn) -> JobResult:
    """Return the result of a job, from what it returned and from its folder."""
    overrides = [str(word) for word in job_return.overrides or []]
    failure: str | None = job_return.return_value
    try:
        cfg: Any = job_return.cfg
        stage, folder = job_stage(cfg), job_folder(cfg)
        result = JobResult(
            overrides=overrides, folder=str(folder), stage=stage.name, summary=list(stage.summary),
            command=alone(cfg, overrides),
        )  # fmt: skip
        if failure is None:
            from lightning_rlhf.stages.measured import metrics_of  # which imports torch

            return replace(result, status="done", metrics=dict(metrics_of(folder / FINAL, stage)))
    except RLHFError as error:
        failure = failure or str(error)
        result = JobResult(overrides=overrides)
    return replace(result, status=STOPPED if failure == STOPPED else "failed", failure=failure)


def alone(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of the command that runs a job of a sweep alone, in the same folder."""
    stage = cfg.stage
    kept = []
    for override in parse_overrides(overrides):
        key = override.key_or_group
        is_read = stage is None or stage_of(override, STAGES) in (None, stage)
        if key not in DECIDED and not key.startswith(TRIAL) and is_read:
            kept.append(str(override.input_line))
    job = [] if cfg.job is None else [f'job="{cfg.job}"']
    return [*own_configs(), *kept, *job, *(["resume=auto"] if stage is not None else [])]


def command_line(result: JobResult) -> str:
    """Return the command that runs a job alone, as it is typed in a shell."""
    return f"{program_name()} {shlex.join(result.command)}"


def row(result: JobResult) -> SweepRow:
    """Return a job as a row of the table on the terminal."""
    from lightning_rlhf.report.tables import SweepRow

    shown = {name: result.metrics[name] for name in result.summary if name in result.metrics}
    words = tuple(word for word in result.overrides if not key_of(word).startswith(TRIAL))
    return SweepRow(overrides=words, status=result.status, metrics=shown)


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
