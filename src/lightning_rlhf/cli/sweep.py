"""The jobs of a sweep: their names and folders, how they are launched, and the table and page."""

import math
import os
import re
import shutil
import signal
import sys
import tempfile
import warnings
import zlib
from collections import Counter
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

from lightning_rlhf.callbacks.stop import SIGNALS
from lightning_rlhf.cli.arguments import key_of, parse_overrides, without_secrets
from lightning_rlhf.cli.recipe import override_value, read_recipe, recipe_folder, split_step
from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import ConfigError, RLHFError, require
from lightning_rlhf.core.metrics import short_name, signed
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import full_disk_told, written_whole
from lightning_rlhf.report.tables import ABSENT, Table
from lightning_rlhf.runs.console import print_error
from lightning_rlhf.runs.folders import (
    CONFIG,
    FAILED,
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
LONGEST = 120
"""Maximum number of bytes of a job's name before its digest; file systems allow 255."""
FOREIGN, ODD = r"[^\w.+=,-]", r"[^\w.+-]"
"""Patterns of the characters that are not allowed in the name of a job's folder."""
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
"""Hydra's own launcher, which runs the jobs one after another in the process of the command."""
STOP = "LIGHTNING_RLHF_STOP"
"""Environment variable with a temporary folder of the sweep on the machine of the command: a file
in it, named by a signal's number, ends the jobs of this machine. The folder's name ends with the
number of the process of the command."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of a sweep before it runs."""

    overrides: Sequence[str]
    words: Sequence[str]
    """Overrides with the name of the job's folder, and what else the launcher is given."""
    cfg: DictConfig


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A job of a sweep after it has ended."""

    overrides: Sequence[str]
    status: str = "failed"
    """End of the job: done, pruned, stopped or failed."""
    failure: str | None = None
    """Why it has no result; None for a finished job."""
    folder: str | None = None
    """Folder of the run; None where the configuration names none."""
    stage: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics at the end of the run."""
    summary: Sequence[str] = ()
    """Names of the metrics that the table shows."""


def adapt(cfg: DictConfig, overrides: Sequence[str], varied: Collection[str]) -> None:
    """Set the name of the folder of a sweep's job.

    The name holds all overrides where the folder of that name has a run, or the folder of the short
    name has a run of another configuration.

    overrides: overrides of the job; varied: keys in which the jobs of the sweep differ.
    """
    with open_dict(cfg), suppress(RLHFError, OmegaConfBaseException):  # the job itself reports it
        cfg.job = whole = whole_name(overrides)
        if (folder_of(read_settings(cfg)) / CONFIG).is_file():
            return
        cfg.job = job_name(overrides, varied) or whole
        settings = read_settings(cfg)
        file = folder_of(settings) / CONFIG
        is_there = file.is_file() and not cfg.overwrite
        if is_there and changes(settings.definition, settings.tree, file):
            cfg.job = whole


def job_settings(cfg: DictConfig) -> Settings | None:
    """Return the checked settings of a job that Hydra composed for a sweep; None for a recipe.

    Raises ConfigError for a value that is refused.
    """
    return None if cfg.stage is None and cfg.recipe is not None else read_settings(cfg)


def name_words(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that change the results and are not part of the run's path."""
    return [o.lstrip("+~") for o in overrides if key_of(o) not in NAMELESS]


def job_name(overrides: Sequence[str], varied: Collection[str]) -> str | None:
    """Return the name of a job's folder: the values of the keys that vary; None if none does.

    stage=ppo seed=1 ppo.kl_coef=0.1, both numbers varied -> kl_coef=0.1,seed=1. Values in the path
    are omitted.
    """
    values = dict(part.split("=", 1) for part in name_words(overrides) if "=" in part)
    keys = sorted(key for key in values if key in varied)
    ends = Counter(key.rpartition(".")[2] for key in keys)
    parts = []
    for key in keys:
        end = key.rpartition(".")[2]
        value = values[key].strip("'\"")
        parts.append(f"{end if ends[end] == 1 else key}={value}")
    return folder_name(",".join(parts), FOREIGN)


def whole_name(overrides: Sequence[str]) -> str | None:
    """Return the name that holds all overrides: ppo.kl_coef-0.1+seed-1."""
    return folder_name(re.sub(ODD, "-", "+".join(sorted(name_words(overrides)))), ODD)


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


def job_place(cfg: DictConfig) -> tuple[str, Path]:
    """Return the stage of a job and the folder that it writes to.

    For a whole recipe they are those of its last step; one that is a program, or that is not known,
    has the stage `ppo`.
    """
    stage, inner = cfg.stage or "ppo", None
    recipe = OmegaConf.select(cfg, "recipe", throw_on_resolution_failure=False)
    if cfg.stage is None and recipe is not None:
        with suppress(ConfigError):  # the job itself reports it
            steps = read_recipe(recipe_folder(recipe)).stages
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


def result_of(job: Job, failure: str | None, *, is_known: bool = True) -> JobResult:
    """Return the result of a job, from what it returned and from its folder.

    failure: why it failed, STOPPED, or None.
    is_known: False where the launcher has not told; the folder alone tells then.
    """
    result = JobResult(overrides=job.overrides)
    try:
        cfg: Any = job.cfg
        require(isinstance(cfg.outputs, str), "outputs", cfg.outputs, "the path of a folder")
        name, folder = job_place(cfg)
        tree: Any = OmegaConf.to_container(cfg)
        stage = chosen_stage(tree | {"stage": name})[2]()
        result = replace(result, folder=str(folder), stage=name, summary=list(stage.summary))
        if not is_known and not (folder / FINAL).is_dir():
            written = folder / FAILED
            failure = written.read_text().strip() if written.is_file() else "it has no result"
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


ignore_presets()  # also where a launcher composes a job in another process


def stopped_by() -> int | None:
    """Return the signal that has ended the sweep of which this process runs a job, if any."""
    there = Path(os.environ[STOP]).glob("*") if STOP in os.environ else iter(())
    return next((int(file.name) for file in there), None)


def is_sweeper() -> bool:
    """Return whether this process is that of the command, and not one that a launcher started."""
    return os.environ[STOP].endswith(f"-{os.getpid()}") if STOP in os.environ else False


def end_early(signum: int) -> None:
    """End the sweep after a signal: the jobs of this machine write a checkpoint and end."""
    Path(os.environ[STOP], str(signum)).touch()


@contextmanager
def stoppable(*, is_apart: bool) -> Iterator[None]:
    """Within the block, pass a signal on to the jobs that run apart from this process."""

    def receive(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        os.write(2, b"\nending the jobs, with a checkpoint each; a second signal ends at once\n")
        end_early(signum)

    made = Path(tempfile.mkdtemp(prefix="lightning-rlhf-"))
    os.environ[STOP] = str(made.rename(f"{made}-{os.getpid()}"))
    before = {s: signal.signal(s, receive) for s in SIGNALS} if is_apart else {}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        shutil.rmtree(os.environ.pop(STOP))


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
        swept = [o.key_or_group for o in parse_overrides(words) if o.is_sweep_override()]
        self.varied = [*swept, *map(key_of, params)]
        self.name = whole_name(words)
        """Name of the sweep among those of the run; None where it has no overrides."""
        self.goal: tuple[str, Mode] | None = None
        """Metric of a study, by which the jobs are sorted, with its direction."""
        self.results: list[JobResult] = []

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the configuration of a job. Raises Hydra's error where it cannot be composed."""
        cfg = self.loader.load_sweep_config(self.config, list(overrides))
        return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])

    def job(self, overrides: Sequence[str], more: Sequence[str] = ()) -> Job:
        """Return the job of these overrides. more: overrides that are not part of its name."""
        cfg = self.compose(overrides)
        adapt(cfg, overrides, self.varied)
        words = [word for word in overrides if key_of(word) != "job"]
        words += [] if cfg.job is None else [f"job={override_value(cfg.job)}"]
        return Job(overrides=overrides, words=[*words, *more], cfg=cfg)

    def launch(self, jobs: Sequence[Job]) -> None:
        """Run jobs and append their results. Raises the error with which the launcher gave up."""
        begun = len(self.results)
        try:
            words = [job.words for job in jobs]
            returned = self.launcher.launch(words, initial_job_idx=begun)
            failures = [found.return_value for found in returned]
        except Exception:
            self.results += [result_of(job, None, is_known=False) for job in jobs]
            raise
        self.results += map(result_of, jobs, failures)

    def run(self, launch_all: Callable[[], None]) -> None:
        """Launch the jobs by `launch_all`, and show them.

        Exits with a status other than 0 where a job failed, there is none, the page was not written
        or the sweep was stopped.
        """
        is_apart = self.config.hydra.launcher.get("_target_") != BASIC
        with stoppable(is_apart=is_apart):
            try:
                launch_all()
            except Exception:
                self.show()
                raise
            status = self.show()
        if not self.results:
            raise ConfigError(
                "a key of the sweep has no value, so that it has no job; allowed: one or more, as "
                "range(START,STOP) with START below STOP has"
            )
        if status:
            sys.exit(status)

    def show(self) -> int:
        """Show table, failed jobs, page and a copy of it; return the exit status."""
        stopped = stopped_by()
        if stopped is None and any(r.status == STOPPED for r in self.results):
            stopped = signal.SIGTERM  # a signal to that job alone
        if self.goal is not None:
            self.results.sort(key=partial(merit, self.goal), reverse=True)
        if self.results:
            console = get_console()
            if not console.is_terminal:  # where no cell is broken
                console = Console(width=10_000)
            console.print(jobs_table(self.results, None).console(), crop=False)
        is_compared = self.compare()
        failed = [result for result in self.results if result.status == "failed"]
        for result in failed:
            print_line(f"failed: {' '.join(result.overrides)}: {result.failure}")
        if stopped is not None:
            print_line("stopped; the same command goes on")
            return 128 + stopped
        return int(bool(failed) or not is_compared)

    def compare(self) -> bool:
        """Write the page that compares the jobs. Return False where an error prevents it."""
        begun = [r for r in self.results if r.folder and (Path(r.folder) / CONFIG).is_file()]
        names = ["compare.html", *([f"compare_{self.name}.html"] if self.name else [])]
        try:
            if begun:
                from lightning_rlhf.evaluation.compare import compare_runs  # which imports torch

                stage = "ppo" if "ppo" in [r.stage for r in begun] else str(begun[0].stage)
                found = compare_runs([Path(str(r.folder)) for r in begun], stage, fewest=1)
                known = find_stage(stage)
                best = None if known is None else next(iter(known.goal), None)
                title = " ".join([f"Sweep {self.folder}:", *self.words])
                table = jobs_table(self.results, self.goal or best)
                for name in names:
                    with full_disk_told(), written_whole(self.folder / name, kind="page") as beside:
                        found.write(beside, title, table)
                print_line(f"comparison: {self.folder / names[0]}")
        except Exception as error:  # the failed jobs are still to be listed
            kind = "" if isinstance(error, RLHFError) else f"{type(error).__name__}: "
            print_error(f"no comparison: {without_secrets(f'{kind}{error}')}")
            return False
        return True


def merit(goal: tuple[str, Mode], result: JobResult) -> tuple[bool, float]:
    """Return what is larger for the better job: pruned and failed ones are the last."""
    metric, mode = goal
    return result.status == "done", signed(result.metrics.get(metric, math.nan), mode)


def jobs_table(results: Sequence[JobResult], goal: tuple[str, Mode] | None) -> Table:
    """Return the table of all jobs, one per row; the overrides that all share are in the title.

    goal: metric of the best job, which is named below with why others failed; None for neither.
    """
    first = results[0].overrides if len(results) > 1 else ()
    shared = [word for word in first if all(word in result.overrides for result in results)]
    own = [" ".join(word for word in result.overrides if word not in shared) for result in results]
    names = list(dict.fromkeys(n for r in results for n in r.summary if n in r.metrics))
    rows = [
        [words, r.status, *(f"{r.metrics[n]:z.3f}" if n in r.metrics else ABSENT for n in names)]
        for words, r in zip(own, results, strict=True)
    ]
    columns, note = ["overrides", "status", *map(short_name, names)], ""
    if goal is not None:
        if any(result.failure for result in results):
            columns.append("why")
            rows = [[*cells, r.failure or ""] for cells, r in zip(rows, results, strict=True)]
        metric, mode = goal
        best = max(results, key=partial(merit, goal))
        if best.status == "done" and metric in best.metrics:
            word = {"min": "Lowest", "max": "Highest"}[mode]
            words = own[results.index(best)] or " ".join(best.overrides)
            note = f"{word} {metric}: {best.metrics[metric]:.4g}, {words}."
    return Table(title=" ".join(["Sweep", *shared]), columns=columns, rows=rows, note=note)
