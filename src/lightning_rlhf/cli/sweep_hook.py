"""Hydra callback that records the results of a sweep; it imports no slow library in other modes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.io.storage import written_whole

if TYPE_CHECKING:  # its imports take seconds, which no other command is to wait for
    from lightning_rlhf.cli.sweep import JobResult
    from lightning_rlhf.core.config import Mode

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
"""Hydra's own launcher, which runs the jobs one after another in the process of the command."""
PREFIX = f".sweep-{socket.gethostname()}-"
"""Start of the name of a folder of results; the number of its process follows."""


def ignore_presets() -> None:
    """Ignore Hydra's warning that a file of conf/hydra/launcher has the name of a plugin's own."""
    warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against")


class SweepHook(Callback):
    """Hydra callback that records the result of each job of a sweep.

    A launcher may pickle it, and call it for a job in another process or on another machine; what a
    job leaves is a file in a folder that all see, which is deleted at the end of the sweep.
    """

    current: ClassVar[SweepHook | None] = None
    """Hook of the sweep that runs in this process, or that the job of this process is of."""
    before: ClassVar[dict[int, Any]] = {}
    """Handlers of the signals that end a sweep, from before it."""
    varied: Sequence[str] = ()
    """Keys whose values differ between the jobs of the sweep."""
    is_apart: bool = False
    """True if each job runs in a process of its own."""
    name: str | None = None
    """Name of the sweep among those of the run; None where it has no overrides."""
    goal: tuple[str, Mode] | None = None
    """Metric of a study, by which the jobs are sorted, with its direction."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the callback in the process of a job, and ignore the warning there as well."""
        vars(self).update(state)
        ignore_presets()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from lightning_rlhf.cli.sweep import varied_keys, whole_name

        words: Any = OmegaConf.to_container(config.hydra.overrides.task)  # as typed
        try:
            self.open(Path(config.hydra.sweep.dir), words)
        except OSError:  # the sweeper, which writes into the same folder, reports it
            return
        self.varied, self.name = varied_keys(config), whole_name(words)
        self.is_apart = config.hydra.launcher.get("_target_") != BASIC
        if self.is_apart:
            for signum in (signal.SIGTERM, signal.SIGINT):
                SweepHook.before[signum] = signal.signal(signum, self.stop)

    def open(self, sweep: Path, words: Sequence[str] = ()) -> None:
        """Make the folder of results in that of the sweep; delete those of killed sweeps.

        words: overrides of the sweep.
        """
        sweep.mkdir(parents=True, exist_ok=True)
        for left in sweep.glob(f"{PREFIX}*-*"):
            with suppress(PermissionError):  # of another user's process
                try:
                    os.kill(int(left.name.split("-")[-2]), 0)
                except ProcessLookupError:
                    shutil.rmtree(left, ignore_errors=True)
        self.sweep, self.words, self.process = sweep, words, os.getpid()
        prefix = f"{PREFIX}{self.process}-"
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=sweep.absolute()))
        SweepHook.current = self

    def on_job_start(
        self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any
    ) -> None:
        if not hasattr(self, "folder"):
            return
        SweepHook.current = self
        if self.process != os.getpid():  # Ctrl-C is for that one, which passes it on
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        from lightning_rlhf.cli.sweep import JobResult

        words: Any = OmegaConf.to_container(config.hydra.overrides.task)  # as typed
        own = JobResult(
            overrides=words, status="running", host=socket.gethostname(), process=os.getpid()
        )
        self.write(config.hydra.job.num, own)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        from lightning_rlhf.cli.sweep import result_of

        if hasattr(self, "folder"):
            self.write(config.hydra.job.num, result_of(job_return))

    def write(self, number: int, result: JobResult) -> None:
        """Write what is known of a job, as one file whatever reads it meanwhile."""
        with written_whole(self.folder / f"{number:06d}.json") as beside:
            beside.write_text(json.dumps(asdict(result)))

    def read(self) -> dict[int, JobResult]:
        """Return the results by the number of the job."""
        from lightning_rlhf.cli.sweep import JobResult

        files = sorted(self.folder.glob("*.json"))
        return {int(file.stem): JobResult(**json.loads(file.read_text())) for file in files}

    @property
    def stopped_by(self) -> int | None:
        """Return the signal that has ended the sweep, so that no further job is to begin."""
        file = self.folder / "stopped"
        return int(file.read_text()) if file.exists() else None

    def end_early(self, signum: int) -> None:
        """Keep further jobs from beginning, after a signal."""
        (self.folder / "stopped").write_text(str(signum))

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """End the sweep after a signal: running jobs of this machine write a checkpoint and end."""
        signal.signal(signum, signal.SIG_DFL)
        os.write(2, b"\nending the jobs, with a checkpoint each; a second signal ends at once\n")
        self.end_early(signum)
        for result in self.read().values():
            if result.status == "running" and result.host == socket.gethostname():
                with suppress(ProcessLookupError):
                    os.kill(result.process, signal.SIGTERM)

    @classmethod
    def show_ended(cls, problem: str | None = None) -> None:
        """Show the results of the sweep of this process, if it is one.

        Hydra would swallow the errors of a callback for the end of a sweep.

        problem: why its launcher or sweeper gave up, which the caller prints; None where it came to
            its end.
        """
        if cls.current is None:
            return
        from lightning_rlhf.cli.sweep import show

        self = cls.current
        show(
            list(self.read().values()), folder=self.sweep, words=self.words, name=self.name,
            goal=self.goal, stopped=self.stopped_by, problem=problem,
        )  # fmt: skip

    @classmethod
    def finish(cls) -> None:
        """Forget the sweep of this process."""
        for signum, handler in cls.before.items():
            signal.signal(signum, handler)
        if cls.current is not None:
            shutil.rmtree(cls.current.folder, ignore_errors=True)
        cls.before, cls.current = {}, None
