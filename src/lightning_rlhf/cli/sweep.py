"""The jobs of a sweep: their names and folders, how each is run, and the table and page of all."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich import get_console
from rich.console import Console

from lightning_rlhf.callbacks.stop import Stopped
from lightning_rlhf.cli.messages import program_name
from lightning_rlhf.cli.overrides import TRIAL, key_of, parse_overrides, stage_of, without_secrets
from lightning_rlhf.cli.recipe import own_configs, read_recipe, recipe_folder, split_step
from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import ConfigError, RLHFError, require
from lightning_rlhf.core.metrics import signed
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import full_disk_told, written_whole
from lightning_rlhf.stages import console
from lightning_rlhf.stages.console import print_error
from lightning_rlhf.stages.folder.changes import changes
from lightning_rlhf.stages.folder.folders import (
    CONFIG,
    FAILED,
    FINAL,
    folder_of,
    is_used,
    leave_failed,
    refuse_foreign_files,
    run_folder,
)
from lightning_rlhf.stages.process import IN_SWEEP, STOPPED, run_command
from lightning_rlhf.stages.settings import read_settings
from lightning_rlhf.stages.stage import STAGES, chosen_stage, find_stage

IN_PATH = ("stage", "model", "run", "outputs", "recipe")
NEUTRAL = ("resume", "overwrite", "debug", "samples", "logger", "callbacks", "trainer")
DECIDED = ("job", "resume", "overwrite")
"""Keys that the command of a single job sets itself."""
GROUP = "WANDB_RUN_GROUP"
"""Environment variable with which a user names the group of runs in W&B."""
LONGEST = 120
"""Maximum number of bytes of a job's name before its digest; file systems allow 255."""
FOREIGN, ODD = r"[^\w.+=,-]", r"[^\w.+-]"
"""Patterns of the characters that are not allowed in the name of a job's folder."""


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
    """Arguments of the command that runs the job alone; none where that refuses the configuration
    of the job, or where it is not known."""
    host: str = ""
    process: int = 0
    """Number of the process in which the job runs, on `host`; 0 for a job of an earlier command."""


def adapt(cfg: DictConfig, overrides: Sequence[str], varied: Collection[str]) -> None:
    """Set the name of the folder of a sweep's job.

    It is the whole name where a folder of that name is there, or where the folder of the short name
    holds a run of another configuration.

    overrides: overrides of the job; varied: keys in which the jobs of the sweep differ.
    """
    whole = whole_name(overrides)
    with open_dict(cfg), suppress(RLHFError, OmegaConfBaseException):  # the job itself reports it
        cfg.job = job_name(overrides, varied)
        parts = str(cfg.outputs), str(cfg.run), str(cfg.model.name)
        is_whole = whole is not None and Path(*parts, whole).is_dir()
        if not is_whole and not cfg.overwrite:
            settings = read_settings(cfg)
            file = folder_of(settings) / CONFIG
            is_whole = file.is_file() and bool(changes(settings.definition, settings.tree, file))
        if is_whole:
            cfg.job = whole


def varied_keys(config: DictConfig) -> tuple[str, ...]:
    """Return the keys for which a sweep was given more than one value.

    config: Hydra's own configuration of the sweep.
    """
    given = parse_overrides(config.hydra.overrides.task)
    keys = [o.key_or_group for o in given if o.is_sweep_override()]
    params = config.hydra.sweeper.get("params") or {}
    return (*keys, *map(key_of, params))


def job_name(overrides: Sequence[str], varied: Collection[str]) -> str | None:
    """Return the name of a job's folder: the values of the keys that vary in the sweep.

    stage=ppo seed=1 ppo.kl_coef=0.1, both numbers varied -> kl_coef=0.1,seed=1. Values in the path
    are omitted; where nothing else varies, the name holds all overrides.
    """
    values = dict(part.split("=", 1) for part in _kept(overrides) if "=" in part)
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
    return folder_name(re.sub(ODD, "-", "+".join(sorted(_kept(overrides)))), ODD)


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


def _kept(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that change the results and are not part of the run's path."""
    kept = (o for o in without_trial(overrides) if key_of(o) not in (*IN_PATH, *NEUTRAL))
    return [override.lstrip("+~") for override in kept]


def without_trial(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a job without those with which it reports to a study."""
    return [word for word in overrides if not key_of(word).startswith(TRIAL)]


def set_group(cfg: DictConfig) -> None:
    """Make the jobs of a sweep one group of W&B, named after the run, unless the user named one."""
    logger: Any = cfg.get("logger") or {}
    if logger.get("kind") == "wandb" and logger.get("group") is None and not os.getenv(GROUP):
        logger.group = str(cfg.run)


def job_place(cfg: DictConfig) -> tuple[str, Path]:
    """Return the stage of a job and the folder that it writes to.

    For a whole recipe they are those of its last step; one that is a program, or that is not known,
    has the stage `ppo`.
    """
    stage, inner = cfg.stage or "ppo", None
    recipe = OmegaConf.select(cfg, "recipe", throw_on_resolution_failure=False)
    if cfg.stage is None and recipe is not None:
        with suppress(ConfigError):  # the job itself reports it
            steps = read_recipe(recipe_folder(recipe, console.RECIPES)).stages
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


def run_job(cfg: DictConfig, overrides: Sequence[str]) -> str | None:
    """Run the job of a sweep in a process of its own, which may crash without ending the others.

    Return why it failed, else None. Its output goes to `<stage>.log` beside its folder, as jobs may
    run at the same time.

    Raises Stopped after a signal, when the job has written its checkpoint.
    """
    _, folder = job_place(cfg)
    refuse_foreign_files(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    written, log = folder / FAILED, folder.with_name(f"{folder.name}.log")
    written.unlink(missing_ok=True)
    words = [word for word in overrides if key_of(word) != "job"]
    words += [] if cfg.job is None else [f'job="{cfg.job}"']
    command = [sys.executable, "-m", "lightning_rlhf", *own_configs(), *words]
    with log.open("ab") as output, checkpoint_before_requeue():
        status = run_command(command, {IN_SWEEP: "1"}, output)
    if status == 0:
        return None
    if status > 0 and written.is_file():
        return f"{written.read_text().strip()}; its output is in {log}"
    why = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return mark_failed(cfg, f"{why}; its output is in {log}")


@contextmanager
def checkpoint_before_requeue() -> Iterator[None]:
    """End the job after a checkpoint before submitit requeues it in its handler of SIGUSR2.

    The signal becomes a SIGTERM to this process, which `run_command` passes on to the job.
    """
    requeue: Any = signal.getsignal(signal.SIGUSR2)
    if not callable(requeue):
        yield
        return
    came: list[int] = []

    def end_job(*received: Any) -> None:
        came.append(received[0])
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR2, end_job)
    try:
        yield
    except Stopped:
        if not came:
            raise
    finally:
        signal.signal(signal.SIGUSR2, requeue)
    if came:
        requeue(came[0], None)


def result_of(job_return: JobReturn) -> JobResult:
    """Return the result of a job, from what it returned and from its folder."""
    overrides = [str(word) for word in job_return.overrides or []]
    failure: str | None = job_return.return_value
    result = JobResult(overrides=overrides)
    try:
        cfg: Any = job_return.cfg
        require(isinstance(cfg.outputs, str), "outputs", cfg.outputs, "the path of a folder")
        name, folder = job_place(cfg)
        tree: Any = OmegaConf.to_container(cfg)
        stage = chosen_stage(tree | {"stage": name})[2]()
        result = replace(
            result, folder=str(folder), stage=name, summary=list(stage.summary),
            command=alone(cfg, overrides),
        )  # fmt: skip
        if failure is None:
            from lightning_rlhf.stages.measured import metrics_of  # which imports torch

            is_program = cfg.stage is None and not (folder / FINAL).is_dir()  # it leaves no final/
            metrics = {} if is_program else dict(metrics_of(folder / FINAL, stage))
            return replace(result, status="done", metrics=metrics)
    except (RLHFError, OmegaConfBaseException) as error:
        failure = failure or str(error)
    return replace(result, status=STOPPED if failure == STOPPED else "failed", failure=failure)


def alone(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of the command that runs a job of a sweep alone, in the same folder.

    There are none where its configuration is refused.
    """
    stage = cfg.stage
    if stage is not None:
        try:
            read_settings(cfg)
        except ConfigError:
            return []
    kept = []
    for override in parse_overrides(without_trial(overrides)):
        is_read = stage is None or stage_of(override, STAGES) in (None, stage)
        if override.key_or_group not in DECIDED and is_read:
            kept.append(str(override.input_line))
    job = [] if cfg.job is None else [f'job="{cfg.job}"']
    return [*own_configs(), *kept, *job, *(["resume=auto"] if stage is not None else [])]


def command_line(result: JobResult) -> str:
    """Return the command that runs a job alone, as it is typed in a shell."""
    return f"{program_name()} {shlex.join(result.command)}"


def show(
    results: list[JobResult],
    *,
    folder: Path,
    words: Sequence[str],
    name: str | None,
    goal: tuple[str, Mode] | None,
    stopped: int | None,
    problem: str | None,
) -> None:
    """Print the table and the failed jobs, and write the page with a copy for this sweep.

    Exits with a status other than 0 where a job failed, the page was not written or the sweep was
    stopped.

    folder: folder of all sweeps of the run; name: name of this one among them.
    words: overrides of the sweep.
    goal: metric of a study, by which the jobs are sorted, with its direction.
    stopped: signal that has ended the sweep.
    problem: why the launcher gave up, if it did; the caller prints it.
    """
    from lightning_rlhf.report.tables import WIDEST, SweepRow, sweep_table  # which imports torch

    results = [
        replace(r, status="ended", failure=problem or "it ended without a result")
        if r.status == "running"
        else r
        for r in results
    ]
    if stopped is None and any(r.status == STOPPED for r in results):  # a signal to that job alone
        stopped = signal.SIGTERM
    if goal is not None:
        results.sort(key=partial(rank, goal), reverse=True)
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
    pages = [folder / f"{page}.html" for page in ("compare", name and f"compare_{name}") if page]
    is_compared = compare(results, pages, " ".join([f"Sweep {folder}:", *words]), goal)
    failed = [result for result in results if result.status in ("failed", "ended")]
    for result in failed:
        print_line(f"failed: {' '.join(without_trial(result.overrides))}: {result.failure}")
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


def compare(
    results: Sequence[JobResult], pages: Sequence[Path], title: str, goal: tuple[str, Mode] | None
) -> bool:
    """Write the page that compares the jobs. Return False where an error prevents it."""
    # A finished run in the folder of a failed job is another one, with which it was tried alone.
    others = [
        r.folder
        for r in results
        if r.status == "failed" and (Path(r.folder or "") / FINAL).is_dir()
    ]
    begun = [r for r in results if r.folder and r.folder not in others and is_used(Path(r.folder))]
    try:
        if begun:
            from lightning_rlhf.stages.compare import compare_runs  # which imports torch

            stage = "ppo" if "ppo" in [r.stage for r in begun] else str(begun[0].stage)
            found = compare_runs([Path(str(r.folder)) for r in begun], stage, fewest=1)
            known = find_stage(stage)
            best = None if known is None else next(iter(known.goal), None)
            table = jobs_table(results, goal or best)
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


def jobs_table(results: Sequence[JobResult], goal: tuple[str, Mode] | None) -> Any:
    """Return the `TextTable` of all jobs on the page, with the best one below.

    goal: metric that tells which is the best, with its direction.
    """
    from lightning_rlhf.report.run_page import TextTable
    from lightning_rlhf.report.tables import shared_overrides

    jobs = [without_trial(result.overrides) for result in results]
    shared = shared_overrides(jobs)
    own = [" ".join(word for word in words if word not in shared) for words in jobs]
    heading, rows = ["job", "status"], [[o, r.status] for o, r in zip(own, results, strict=True)]
    if any(result.failure for result in results):
        heading += ["why", "command that runs it alone"]
        for cells, r in zip(rows, results, strict=True):
            cells += [r.failure or "", command_line(r) if r.failure and r.command else ""]
    note = ""
    if goal is not None:
        metric, mode = goal
        index = max(range(len(results)), key=lambda i: rank(goal, results[i]))
        best, words = results[index], own[index] or " ".join(jobs[index])
        if best.status == "done" and metric in best.metrics:
            word = {"min": "Lowest", "max": "Highest"}[mode]
            note = f"{word} {metric}: {best.metrics[metric]:.4g}, {words}."
    return TextTable(title="Jobs", heading=heading, rows=rows, note=note)
