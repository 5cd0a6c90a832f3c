"""The jobs of a sweep: their names and folders, how each runs and ends, the table and the page."""

import math
import os
import re
import signal
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich import get_console
from rich.console import Console

from lightning_rlhf.callbacks.stop import SIGNALS, Stopped
from lightning_rlhf.cli import arguments
from lightning_rlhf.cli import recipe as recipes
from lightning_rlhf.cli.launch import override_value, own_configs, run_command
from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import ConfigError, RLHFError, require
from lightning_rlhf.core.metrics import signed
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import storage_errors, written_whole
from lightning_rlhf.report.tables import ABSENT, Table
from lightning_rlhf.runs import folders
from lightning_rlhf.runs.settings import folder_names, read_settings
from lightning_rlhf.runs.stage import chosen_stage, find_stage

NEUTRAL = ("resume", "overwrite", "debug", "samples", "logger", "callbacks", "trainer")
"""Keys that do not change the results of a job."""
NAMELESS = ("stage", "model", "run", "outputs", "recipe", *NEUTRAL)
"""Keys that are not in the name of a job's folder; the first ones are in its path."""
LONGEST = 120
"""Maximum number of bytes of a job's name before its digest; file systems allow 255."""
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
"""Hydra's own launcher, which runs the jobs one after another in the process of the command."""
IN_SWEEP = "LIGHTNING_RLHF_IN_SWEEP"
"""Environment variable set for a process that is a job of a sweep."""
STOPPED, UNKNOWN = "stopped", "it has no result"
"""Failure of a job that a signal has ended, or kept from beginning, and of one whose launcher has
not told how it ended."""
STOP = "LIGHTNING_RLHF_STOP"
"""Environment variable with a temporary folder of the sweep on the machine of the command: a file
in it, named by a signal's number, ends the jobs of this machine. The folder's name ends with the
number of the process of the command."""
# Hydra's, where a file of conf/hydra/launcher has the name of a plugin's own configuration.
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of a sweep, with its result once it has ended."""

    overrides: Sequence[str]
    words: Sequence[str] = ()
    """Overrides with the name of the job's folder, and what else the launcher is given."""
    cfg: Any = None
    """Configuration of the job; None for one of an earlier command."""
    status: str = "failed"
    """End of the job: done, pruned, stopped or failed."""
    failure: str | None = None
    """Why it has no result; None for a finished job."""
    folder: str | None = None
    """Folder of the run, which has the name of its stage; None where it has none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics at the end of the run."""
    summary: Sequence[str] = ()
    """Names of the metrics that the table shows."""


# Name and folder of a job.


def set_name(cfg: DictConfig, overrides: Sequence[str], varied: Collection[str]) -> None:
    """Set `job`, the name of the folder of a sweep's job: the values that vary.

    It holds all values where none varies, where the folder of that name has a run, or where that of
    the short name has a run of another configuration.

    overrides: overrides of the job; varied: keys in which the jobs of the sweep differ.
    """
    whole = job_name(overrides, None)
    with open_dict(cfg), suppress(RLHFError, OmegaConfBaseException):  # the job itself reports it
        cfg.job = whole
        if (folders.folder_of(read_settings(cfg)) / folders.CONFIG).is_file():
            return
        cfg.job = job_name(overrides, varied) or whole
        settings = read_settings(cfg)
        file = folders.folder_of(settings) / folders.CONFIG
        is_there = file.is_file() and not cfg.overwrite
        if is_there and folders.changes(settings.definition, settings.tree, file):
            cfg.job = whole


def job_name(overrides: Sequence[str], varied: Collection[str] | None) -> str | None:
    """Return the name of a job's folder: the values of the keys that vary; None if none does.

    stage=ppo seed=1 ppo.kl_coef=0.1, both numbers varied -> kl_coef=0.1,seed=1. Values in the path
    are omitted. Characters that a folder should not have become "-", and a digest is appended to a
    name that was changed or cut, so that different jobs have different names.

    varied: keys in the name; None for all.
    """
    values = {arguments.key_of(word): word.partition("=")[2].strip("'\"") for word in overrides}
    keys = sorted(k for k in values if k not in NAMELESS and (varied is None or k in varied))
    ends = [key.rpartition(".")[2] for key in keys]
    shown = (end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True))
    text = ",".join(f"{name}={values[key]}" for name, key in zip(shown, keys, strict=True))
    name = re.sub(r"[^\w.+=,-]", "-", text).rstrip(".")
    if name != text or len(name.encode()) > LONGEST:
        start = name.encode()[:LONGEST].decode(errors="ignore")
        name = f"{start}-{zlib.crc32(text.encode()):08x}"
    return name or None


def job_place(cfg: DictConfig) -> Path:
    """Return the folder that a job writes to, which has the name of its stage.

    For a whole recipe it is that of its last step; one that is a program, or that is not known, has
    the stage `ppo`. Raises ConfigError where the configuration names no folder in `outputs`.
    """
    require(isinstance(cfg.outputs, str), "outputs", cfg.outputs, "the path of a folder")
    folder_names({"run": cfg.run, "job": cfg.job, "model": {"name": cfg.model.name}})
    stage, job = cfg.stage or "ppo", cfg.job
    recipe = OmegaConf.select(cfg, "recipe", throw_on_resolution_failure=False)
    if cfg.stage is None and recipe is not None:
        with suppress(ConfigError):  # the job itself reports it
            for step in recipes.read_recipe(recipes.recipe_folder(recipe)).stages[-1:]:
                stage, _, inner = step.partition("@")
                job = "/".join(part for part in (job, inner) if part) or None
    place = Path(cfg.outputs), str(cfg.run), str(cfg.model.name)
    return folders.run_folder(*place, stage, job)


# A job in a process of its own, and its end.


def run_job(cfg: DictConfig, overrides: Sequence[str]) -> str | None:
    """Run the job of a sweep in a process of its own, which may crash without ending the others.

    Return why it failed, or STOPPED after a signal to the command or this process; else None. Its
    output goes to `<stage>.log` beside its folder, as jobs may run at the same time.
    """
    if stopped_by() is not None:
        return STOPPED
    folder = job_place(cfg)
    folders.refuse_foreign_files(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    written, log = folder / folders.FAILED, folder.with_name(f"{folder.name}.log")
    written.unlink(missing_ok=True)
    command = [sys.executable, "-m", "lightning_rlhf", *own_configs(), *overrides]
    try:
        with log.open("ab") as output:
            status = run_command(command, {IN_SWEEP: "1"}, output, stopped_by)
    except Stopped as stop:
        if is_sweeper():  # a signal to another process ends its job alone
            Path(os.environ[STOP], str(stop.signum)).touch()
        return STOPPED
    if stopped_by() is not None and status:
        return STOPPED
    why = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    if status > 0 and written.is_file():
        why = written.read_text().strip()
    return mark_failed(cfg, f"{why}; its output is in {log}") if status else None


def mark_failed(cfg: DictConfig, reason: str) -> str:
    """Write the reason to the job's folder unless it holds a finished run; return the reason."""
    with suppress(RLHFError):  # there is no folder
        folder = job_place(cfg)
        if not (folder / folders.FINAL).is_dir():
            folders.leave_failed(folder, reason)
    return reason


def ended(job: Job, failure: str | None) -> Job:
    """Return a job with its result, from what it returned and from its folder.

    failure: why it failed, STOPPED, or None; where it is UNKNOWN the folder alone tells.
    """
    job = replace(job, status=STOPPED if failure == STOPPED else "failed", failure=failure)
    try:
        folder = job_place(job.cfg)
        tree: Any = OmegaConf.to_container(job.cfg)
        definition = chosen_stage(tree | {"stage": folder.name})[2]()
        job = replace(job, folder=str(folder), summary=list(definition.summary))
        final, written = folder / folders.FINAL, folder / folders.FAILED
        if failure == UNKNOWN and written.is_file():
            job = replace(job, failure=written.read_text().strip())
        if failure is None or (failure == UNKNOWN and final.is_dir()):
            from lightning_rlhf.runs.measured import metrics_of  # which imports torch

            is_program = job.cfg.stage is None and not final.is_dir()  # it leaves no final/
            metrics = {} if is_program else metrics_of(final, definition)
            job = replace(job, status="done", failure=None, metrics=metrics)
    except (RLHFError, OmegaConfBaseException) as error:
        job = replace(job, failure=failure or str(error))
    return job


def stopped_by() -> int | None:
    """Return the signal that has ended the sweep of which this process runs a job, if any."""
    files = Path(os.environ[STOP]).glob("*") if STOP in os.environ else iter(())
    return next((int(file.name) for file in files), None)


def is_sweeper() -> bool:
    """Return whether this process is that of the command, and not one that a launcher started."""
    return os.environ.get(STOP, "").endswith(f"-{os.getpid()}")


@contextmanager
def stoppable(*, is_apart: bool) -> Iterator[None]:
    """Within the block, pass a signal on to the jobs that run apart from this process."""

    def receive(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        os.write(2, b"\nending the jobs, with a checkpoint each; a second signal ends at once\n")
        Path(os.environ[STOP], str(signum)).touch()

    with tempfile.TemporaryDirectory(f"-{os.getpid()}", "lightning-rlhf-") as os.environ[STOP]:
        before = {s: signal.signal(s, receive) for s in SIGNALS} if is_apart else {}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            del os.environ[STOP]


class Jobs:
    """The jobs of one command."""

    def __init__(self, sweeper: Sweeper, words: Sequence[str], params: Mapping[str, Any]) -> None:
        """Begin without a job.

        words: overrides of the command, as typed; params: sweeps in a file, by key.
        """
        found: Any = sweeper  # every sweeper has these three
        self.launcher, self.config = found.launcher, found.config
        self.loader = found.hydra_context.config_loader
        self.words, self.folder = words, Path(self.config.hydra.sweep.dir)
        swept = [o.key_or_group for o in arguments.parse_overrides(words) if o.is_sweep_override()]
        self.varied = [*swept, *map(arguments.key_of, params)]
        self.goal: tuple[str, Mode] | None = None
        """Metric of a study, by which the jobs are sorted, with its direction."""
        self.results: list[Job] = []

    def job(self, overrides: Sequence[str], more: Sequence[str] = ()) -> Job:
        """Return the job of these overrides. Raises Hydra's error where it cannot be composed.

        more: overrides that are not part of its name.
        """
        whole = self.loader.load_sweep_config(self.config, list(overrides))
        cfg = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
        set_name(cfg, overrides, self.varied)
        words = [word for word in overrides if arguments.key_of(word) != "job"]
        words += [] if cfg.job is None else [f"job={override_value(cfg.job)}"]
        return Job(overrides=overrides, words=[*words, *more], cfg=cfg)

    def launch(self, jobs: Sequence[Job]) -> None:
        """Run jobs and append their results. Raises the error with which the launcher gave up."""
        failures = [UNKNOWN] * len(jobs)
        try:
            words = [job.words for job in jobs]
            returned = self.launcher.launch(words, initial_job_idx=len(self.results))
            failures = [found.return_value for found in returned]
        finally:
            self.results += map(ended, jobs, failures)

    def run(self, launch_all: Callable[[], None]) -> None:
        """Launch the jobs by `launch_all`, and show them.

        Exits with a status other than 0 where a job failed or the sweep was stopped. Raises the
        error for which the page was not written.
        """
        with stoppable(is_apart=self.config.hydra.launcher.get("_target_") != BASIC):
            try:
                launch_all()
            except Exception:
                with suppress(RLHFError):  # of the page, which must not replace this one
                    self.show()
                raise
            if status := self.show():
                sys.exit(status)
        if not self.results:
            raise ConfigError("the sweep has no job; allowed: a value or more for each key")

    def show(self) -> int:
        """Show table, failed jobs, and the page that compares the runs; return the exit status."""
        if not self.results:
            return 0
        names = [Path(job.folder).name for job in self.results if job.folder]
        if self.goal is not None:
            self.results.sort(key=partial(sort_key, self.goal), reverse=True)
        places = [Path(job.folder) for job in self.results if job.folder]
        stage = "ppo" if "ppo" in names or not names else names[0]
        known = find_stage(stage)
        is_fair = not any(key.startswith(("reward", "data")) for key in self.varied)
        goal = self.goal or next(iter(known.goal if known is not None and is_fair else ()), None)
        table = jobs_table(self.results, goal)
        # No cell is broken where the output is no terminal.
        console = get_console() if get_console().is_terminal else Console(width=10_000)
        console.print(table.console(), crop=False)
        statuses, stopped = [job.status for job in self.results], stopped_by()
        for job in self.results:
            if job.status == "failed":
                print_line(f"failed: {' '.join(job.overrides)}: {job.failure}")
        if stopped is None and STOPPED in statuses:
            stopped = signal.SIGTERM  # a signal to that job alone
        if stopped is not None:
            print_line("stopped; the same command goes on")
        status = int("failed" in statuses) if stopped is None else 128 + stopped
        if not (begun := [place for place in places if (place / folders.CONFIG).is_file()]):
            return status
        from lightning_rlhf.evaluation.compare import compare_runs  # which imports torch

        failures = [job.failure or "" for job in self.results]
        if any(failures):
            rows = [[*row, why] for row, why in zip(table.rows, failures, strict=True)]
            table = replace(table, columns=[*table.columns, "why"], rows=rows)
        title, page = " ".join([f"Sweep {self.folder}:", *self.words]), self.folder / "compare.html"
        ignored = () if stopped is None else (RLHFError,)
        with suppress(*ignored), storage_errors():
            comparison = compare_runs(begun, stage, minimum=1)
            with written_whole(page, kind="page") as temporary:
                comparison.write(temporary, title, table)
            print_line(f"comparison: {page}")
        return status


def sort_key(goal: tuple[str, Mode], job: Job) -> tuple[bool, float]:
    """Return what is larger for the better job: pruned and failed ones are the last."""
    metric, mode = goal
    return job.status == "done", signed(job.metrics.get(metric, math.nan), mode)


def jobs_table(jobs: Sequence[Job], goal: tuple[str, Mode] | None) -> Table:
    """Return the table of all jobs, one per row; the overrides that all share are in the title.

    goal: metric of the best job, which is named below; None names none.
    """
    first = jobs[0].overrides if len(jobs) > 1 else ()
    shared = [word for word in first if all(word in job.overrides for job in jobs)]
    own = [" ".join(word for word in job.overrides if word not in shared) for job in jobs]
    names = list(dict.fromkeys(n for job in jobs for n in job.summary if n in job.metrics))
    rows = [
        [words, j.status, *(f"{j.metrics[n]:z.3f}" if n in j.metrics else ABSENT for n in names)]
        for words, j in zip(own, jobs, strict=True)
    ]
    note = ""
    if goal is not None:
        metric, mode = goal
        best = max(jobs, key=partial(sort_key, goal))
        if best.status == "done" and metric in best.metrics:
            word = {"min": "Lowest", "max": "Highest"}[mode]
            words = own[jobs.index(best)] or " ".join(best.overrides)
            note = f"{word} {metric}: {best.metrics[metric]:.4g}, {words}: {best.folder}"
    shown = [name.removeprefix("eval/").removeprefix("judge/") for name in names]
    columns = ["overrides", "status", *shown]
    return Table(title=" ".join(["Sweep", *shared]), columns=columns, rows=rows, note=note)
