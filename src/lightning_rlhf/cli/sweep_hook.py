"""Hydra callback that records the results of a sweep; it imports no slow library in other modes."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from lightning_rlhf.cli.sweep_progress import SweepProgress
    from lightning_rlhf.cli.sweep_results import SweepResults

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
"""Hydra's own launcher, which runs the jobs one after another in the process of the command."""


def ignore_presets() -> None:
    """Ignore Hydra's warning that a file of conf/hydra/launcher has the name of a plugin's own."""
    warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against")


class SweepHook(Callback):
    """Hydra callback that records the result of each job of a sweep.

    A launcher may pickle it, and call it for a job in another process.
    """

    varied: ClassVar[tuple[str, ...]] = ()
    """Keys whose values differ between the jobs of the sweep."""
    results: ClassVar[SweepResults | None] = None
    """Results of the sweep that runs in this process, or that the job of this process is of."""
    is_apart: ClassVar[bool] = False
    """True if each job runs in a process of its own."""
    progress: ClassVar[SweepProgress | None] = None
    """Thread that prints when jobs in processes of their own begin and end."""
    before: ClassVar[dict[int, Any]] = {}
    """Handlers of the signals that end a sweep, from before it."""

    def __init__(self) -> None:
        self._shared: tuple[tuple[str, ...], SweepResults | None, bool] = (), None, False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the callback in the process of a job, and ignore the warning there as well."""
        vars(self).update(state)
        ignore_presets()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Imported here, since it takes seconds.
        from lightning_rlhf.cli.sweep import varied_keys
        from lightning_rlhf.cli.sweep_progress import SweepProgress
        from lightning_rlhf.cli.sweep_results import SweepResults

        try:
            words: Any = OmegaConf.to_container(config.hydra.overrides.task)  # as typed
            results = SweepResults(Path(config.hydra.sweep.dir), words)
        except OSError:  # the sweeper, which writes into the same folder, reports it
            return
        is_apart = config.hydra.launcher.get("_target_") != BASIC
        self._shared = varied_keys(config), results, is_apart
        self._share()
        if is_apart:
            # Their lines count the jobs of each batch from 0; these are by the numbers of the jobs.
            logging.getLogger("hydra_plugins").setLevel(logging.WARNING)
            SweepHook.progress = SweepProgress(results, SweepHook.varied)
            SweepHook.progress.start()
            for signum in (signal.SIGTERM, signal.SIGINT):
                SweepHook.before[signum] = signal.signal(signum, results.stop)

    def on_job_start(
        self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any
    ) -> None:
        self._share()
        results = SweepHook.results
        if results is not None:
            if results.process != os.getpid():  # Ctrl-C is for that one, which passes it on
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            words: Any = OmegaConf.to_container(config.hydra.overrides.task)  # as typed
            results.start(config.hydra.job.num, words)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if SweepHook.results is not None:
            SweepHook.results.end(config.hydra.job.num, job_return)

    @classmethod
    def show_ended(cls, problem: str | None = None) -> None:
        """Show the results of the sweep of this process, if it is one.

        Hydra would swallow the errors of a callback for the end of a sweep.

        problem: why its launcher or sweeper gave up; None where it came to its end.
        """
        if cls.progress is not None:
            cls.progress.stop()
        if cls.results is not None:
            cls.results.show(problem)

    @classmethod
    def finish(cls) -> None:
        """Forget the sweep of this process."""
        for signum, handler in cls.before.items():
            signal.signal(signum, handler)
        if cls.progress is not None:
            cls.progress.stop()
        if cls.results is not None:
            cls.results.delete()
        cls.before, cls.varied, cls.results, cls.is_apart = {}, (), None, False
        cls.progress = None

    def _share(self) -> None:
        """Make what the jobs of the sweep have in common known to this process."""
        SweepHook.varied, SweepHook.results, SweepHook.is_apart = self._shared
