"""The jobs of a sweep: their names and folders, how each is run, and the table and page of all."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich import get_console
from rich.console import Console

from lightning_rlhf.cli.arguments import TRIAL, key_of, parse_overrides, without_secrets
from lightning_rlhf.cli.recipe import read_recipe, recipe_folder, split_step
from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import ConfigError, RLHFError, require
from lightning_rlhf.core.metrics import signed
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import full_disk_told, written_whole
from lightning_rlhf.report.tables import WIDEST, SweepRow, Table, shared_overrides, sweep_table
from lightning_rlhf.runs.console import RECIPES, print_error
from lightning_rlhf.runs.folders import (
    CONFIG,
    FINAL,
    changes,
    folder_of,
    leave_failed,
    run_folder,
)
from lightning_rlhf.runs.process import STOPPED
from lightning_rlhf.runs.settings import read_settings
from lightning_rlhf.runs.stage import Settings, chosen_stage, find_stage

NEUTRAL = ("resume", "overwrite", "debug", "samples", "logger", "callbacks", "trainer")
"""Keys that do not change the results of a job."""
NAMELESS = ("stage", "model", "run", "outputs", "recipe", *NEUTRAL)
"""Keys that are not in the name of a job's folder; the first ones are in its path."""
GROUP = "WANDB_RUN_GROUP"
"""Environment variable with which a user names the group of runs in W&B."""
LONGEST = 120
"""Maximum number of bytes of a job's name before its digest; file systems allow 255."""
FOREIGN, ODD = r"[^\w.+=,-]", r"[^\w.+-]"
"""Patterns of the characters that are not allowed in the name of a job's folder."""
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
"""Hydra's own launcher, which runs the jobs one after another in the process of the command."""
PREFIX = f".sweep-{socket.gethostname()}-"
"""Start of the name of a folder of results; the number of its process follows."""


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
    host: str = ""
    process: int = 0
    """Number of the process in which the job runs, on `host`; 0 for a job of an earlier command."""


def adapt(cfg: DictConfig, overrides: Sequence[str], varied: Collection[str]) -> None:
    """Set the name of the folder of a sweep's job.

    The name holds all overrides where the folder of that name has a run, or the folder of the short
    name has a run of another configuration.

    overrides: overrides of the job; varied: keys in which the jobs of the sweep differ.
    """
    with open_dict(cfg), suppress(RLHFError, OmegaConfBaseException):  # the job itself reports it
        cfg.job = whole_name(overrides)
        if (folder_of(read_settings(cfg)) / CONFIG).is_file():
            return
        cfg.job = job_name(overrides, varied)
        settings = read_settings(cfg)
        file = folder_of(settings) / CONFIG
        is_there = file.is_file() and not cfg.overwrite
        if is_there and changes(settings.definition, settings.tree, file):
            cfg.job = whole_name(overrides)


def job_settings(cfg: DictConfig) -> Settings | None:
    """Return the checked settings of a job that Hydra composed for a sweep; None for a recipe.

    Raises ConfigError for a value that is refused.
    """
    if cfg.stage is None and cfg.recipe is not None:
        return None
    return read_settings(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))


def set_group(cfg: DictConfig) -> None:
    """Make the jobs of a sweep one group of W&B, named after the run, unless the user named one."""
    logger: Any = cfg.get("logger") or {}
    if logger.get("kind") == "wandb" and logger.get("group") is None and not os.getenv(GROUP):
        logger.group = str(cfg.run)


def job_name(overrides: Sequence[str], varied: Collection[str]) -> str | None:
    """Return the name of a job's folder: the values of the keys that vary in the sweep.

    stage=ppo seed=1 ppo.kl_coef=0.1, both numbers varied -> kl_coef=0.1,seed=1. Values in the path
    are omitted; where nothing else varies, the name holds all overrides.
    """
    values = dict(part.split("=", 1) for part in _named(overrides) if "=" in part)
    keys = sorted(key for key in values if key in varied)
    if not keys:
        return whole_name(overrides)
    ends = Counter(key.rpartition(".")[2] for key in keys)
    parts = []
    for key in keys:
        end = key.rpartition(".")[2]
        value = values[key].strip("'\"")
        parts.append(f"{end if ends[end] == 1 else key}={value}")
    return folder_name(",".join(parts), FOREIGN)


def whole_name(overrides: Sequence[str]) -> str | None:
    """Return the name that holds all overrides: ppo.kl_coef-0.1+seed-1."""
    return folder_name(re.sub(ODD, "-", "+".join(sorted(_named(overrides)))), ODD)


def folder_name(text: str, foreign: str) -> str | None:
    """Return `text` as the name of a folder, None where it is empty.

    Characters that match `foreign` become "-". A digest of the text is appended to a name that was
    changed or cut, so that different texts have different names.
    """
    name = re.sub(foreign, "-", text).rstrip(".")
    if name != text or len(name.encode()) > LONGEST:
        start = name.encode()[:LONGEST].decode(errors="ignore")
        name = f"{start}-{zlib.crc32(text.encode()):08x}"
    return name or None


def _named(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that change the results and are not part of the run's path."""
    return [o.lstrip("+~") for o in without_trial(overrides) if key_of(o) not in NAMELESS]


def without_trial(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a job without those with which it reports to a study."""
    return [word for word in overrides if not key_of(word).startswith(TRIAL)]


def job_place(cfg: DictConfig) -> tuple[str, Path]:
    """Return the stage of a job and the folder that it writes to.

    For a whole recipe they are those of its last step; one that is a program, or that is not known,
    has the stage `ppo`.
    """
    stage, inner = cfg.stage or "ppo", None
    recipe = OmegaConf.select(cfg, "recipe", throw_on_resolution_failure=False)
    if cfg.stage is None and recipe is not None:
        with suppress(ConfigError):  # the job itself reports it
            steps = read_recipe(recipe_folder(recipe, RECIPES)).stages
            stage, inner = split_step(steps[-1]) if steps else (stage, None)
    job = "/".join(str(part) for part in (cfg.job, inner) if part is not None) or None
    return stage, run_folder(Path(cfg.outputs), str(cfg.run), str(cfg.model.name), stage, job)


def mark_failed(cfg: DictConfig, reason: str) -> str:
    """Write the reason to the job's folder unless it holds a finished run; return the reason."""
    if isinstance(cfg.outputs, str):
        _, folder = job_place(cfg)
        is_inside = Path(os.path.abspath(folder)).is_relative_to(os.path.abspath(cfg.outputs))
        if is_inside and not (folder / FINAL).is_dir():
            leave_failed(folder, reason)
    return reason


def result_of(job_return: JobReturn) -> JobResult:
    """Return the result of a job, from what it returned and from its folder."""
    failure: str | None = job_return.return_value
    result = JobResult(overrides=[str(word) for word in job_return.overrides or []])
    try:
        cfg: Any = job_return.cfg
        require(isinstance(cfg.outputs, str), "outputs", cfg.outputs, "the path of a folder")
        name, folder = job_place(cfg)
        tree: Any = OmegaConf.to_container(cfg)
        stage = chosen_stage(tree | {"stage": name})[2]()
        result = replace(result, folder=str(folder), stage=name, summary=list(stage.summary))
        if failure is None:
            from lightning_rlhf.runs.measured import metrics_of  # which imports torch

            is_program = cfg.stage is None and not (folder / FINAL).is_dir()  # it leaves no final/
            metrics = {} if is_program else dict(metrics_of(folder / FINAL, stage))
            return replace(result, status="done", metrics=metrics)
    except (RLHFError, OmegaConfBaseException) as error:
        failure = failure or str(error)
    return replace(result, status=STOPPED if failure == STOPPED else "failed", failure=failure)


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
        words: Any = OmegaConf.to_container(config.hydra.overrides.task)  # as typed
        try:
            self.open(Path(config.hydra.sweep.dir), words)
        except OSError:  # the sweeper, which writes into the same folder, reports it
            return
        given = parse_overrides(words)
        params = config.hydra.sweeper.get("params") or {}
        self.varied = [o.key_or_group for o in given if o.is_sweep_override()]
        self.varied += map(key_of, params)
        self.name = whole_name(words)
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
        words: Any = OmegaConf.to_container(config.hydra.overrides.task)  # as typed
        own = JobResult(
            overrides=words, status="running", host=socket.gethostname(), process=os.getpid()
        )
        self.write(config.hydra.job.num, own)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if hasattr(self, "folder"):
            self.write(config.hydra.job.num, result_of(job_return))

    def write(self, number: int, result: JobResult) -> None:
        """Write what is known of a job, as one file whatever reads it meanwhile."""
        with written_whole(self.folder / f"{number:06d}.json") as beside:
            beside.write_text(json.dumps(asdict(result)))

    def read(self) -> dict[int, JobResult]:
        """Return the results by the number of the job."""
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
    def finish(cls) -> None:
        """Forget the sweep of this process."""
        for signum, handler in cls.before.items():
            signal.signal(signum, handler)
        if cls.current is not None:
            shutil.rmtree(cls.current.folder, ignore_errors=True)
        cls.before, cls.current = {}, None


def show_ended(problem: str | None = None) -> None:
    """Show the sweep of this process, if it is one: table, failed jobs, page and a copy of it.

    Exits with a status other than 0 where a job failed, the page was not written or the sweep was
    stopped. Hydra would swallow the errors of a callback for the end of a sweep.

    problem: why its launcher or sweeper gave up, which the caller prints; None where it came to its
        end.
    """
    sweep = SweepHook.current
    if sweep is None:
        return
    stopped = sweep.stopped_by
    results = [
        replace(r, status="ended", failure=problem or "it ended without a result")
        if r.status == "running"
        else r
        for r in sweep.read().values()
    ]
    if stopped is None and any(r.status == STOPPED for r in results):  # a signal to that job alone
        stopped = signal.SIGTERM
    if sweep.goal is not None:
        results.sort(key=partial(rank, sweep.goal), reverse=True)
    if results:
        console = get_console()
        if not console.is_terminal:
            console = Console(width=WIDEST)
        rows = [
            SweepRow(
                overrides=tuple(without_trial(r.overrides)), status=r.status,
                metrics={name: r.metrics[name] for name in r.summary if name in r.metrics},
            )
            for r in results
        ]  # fmt: skip
        console.print(sweep_table(rows, console.width), crop=False)
    is_compared = compare(results, sweep)
    failed = [result for result in results if result.status in ("failed", "ended")]
    for result in failed:
        print_line(f"failed: {' '.join(without_trial(result.overrides))}: {result.failure}")
    if stopped is not None:
        print_line("stopped; the same command goes on")
        sys.exit(128 + stopped)
    if problem is None and not results:
        print_error("a key of the sweep has no value, so that it has no job; allowed: one or "
                    "more, as range(START,STOP) with START below STOP has")  # fmt: skip
    if problem is None and (failed or not is_compared or not results):
        sys.exit(1)


def compare(results: Sequence[JobResult], sweep: SweepHook) -> bool:
    """Write the page that compares the jobs. Return False where an error prevents it."""
    begun = [r for r in results if r.folder and (Path(r.folder) / CONFIG).is_file()]
    pages = [sweep.sweep / f"{page}.html"
             for page in ("compare", sweep.name and f"compare_{sweep.name}") if page]  # fmt: skip
    try:
        if begun:
            from lightning_rlhf.evaluation.compare import compare_runs  # which imports torch

            stage = "ppo" if "ppo" in [r.stage for r in begun] else str(begun[0].stage)
            found = compare_runs([Path(str(r.folder)) for r in begun], stage, fewest=1)
            known = find_stage(stage)
            best = None if known is None else next(iter(known.goal), None)
            title = " ".join([f"Sweep {sweep.sweep}:", *sweep.words])
            table = jobs_table(results, sweep.goal or best)
            for path in pages:
                with full_disk_told(), written_whole(path, kind="page") as beside:
                    found.write(beside, title, table)
            print_line(f"comparison: {pages[0]}")
    except Exception as error:  # the failed jobs are still to be listed
        kind = "" if isinstance(error, RLHFError) else f"{type(error).__name__}: "
        print_error(f"no comparison: {without_secrets(f'{kind}{error}')}")
        return False
    return True


def rank(goal: tuple[str, Mode], result: JobResult) -> tuple[bool, float]:
    """Return what is larger for the better job: pruned and failed ones are the last."""
    metric, mode = goal
    return result.status == "done", signed(result.metrics.get(metric, math.nan), mode)


def jobs_table(results: Sequence[JobResult], goal: tuple[str, Mode] | None) -> Table:
    """Return the table of all jobs on the page, with the best one below.

    goal: metric that tells which is the best, with its direction.
    """
    jobs = [without_trial(result.overrides) for result in results]
    shared = shared_overrides(jobs)
    own = [" ".join(word for word in words if word not in shared) for words in jobs]
    heading, rows = ["job", "status"], [[o, r.status] for o, r in zip(own, results, strict=True)]
    if any(result.failure for result in results):
        heading += ["why"]
        rows = [[*cells, r.failure or ""] for cells, r in zip(rows, results, strict=True)]
    note = ""
    if goal is not None:
        metric, mode = goal
        index = max(range(len(results)), key=lambda i: rank(goal, results[i]))
        best, words = results[index], own[index] or " ".join(jobs[index])
        if best.status == "done" and metric in best.metrics:
            word = {"min": "Lowest", "max": "Highest"}[mode]
            note = f"{word} {metric}: {best.metrics[metric]:.4g}, {words}."
    return Table(title="Jobs", columns=heading, rows=rows, note=note)
