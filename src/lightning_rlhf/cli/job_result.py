"""The result of a job of a sweep, and the command that runs the job alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf.cli.messages import program_name
from lightning_rlhf.cli.overrides import parse_overrides, stage_of
from lightning_rlhf.cli.recipe import own_configs
from lightning_rlhf.cli.sweep import job_folder, job_stage, without_trial
from lightning_rlhf.core.errors import ConfigError, RLHFError, require
from lightning_rlhf.stages.folder.folders import FINAL
from lightning_rlhf.stages.process import STOPPED
from lightning_rlhf.stages.registry import STAGES
from lightning_rlhf.stages.settings import read_settings

DECIDED = ("job", "resume", "overwrite")
"""Keys that the command of a single job sets itself."""


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
    process: int = 0
    """Number of the process in which the job runs; 0 for a job of an earlier command."""
    host: str = ""

    @property
    def text(self) -> str:
        """Return the overrides of the job in one line."""
        return " ".join(without_trial(self.overrides))


def result_of(job_return: JobReturn) -> JobResult:
    """Return the result of a job, from what it returned and from its folder."""
    overrides = [str(word) for word in job_return.overrides or []]
    failure: str | None = job_return.return_value
    try:
        cfg: Any = job_return.cfg
        require(isinstance(cfg.outputs, str), "outputs", cfg.outputs, "the path of a folder")
        stage, folder = job_stage(cfg), job_folder(cfg)
        result = JobResult(
            overrides=overrides, folder=str(folder), stage=stage.name, summary=list(stage.summary),
            command=[] if is_refused(cfg) else alone(cfg, overrides),
        )  # fmt: skip
        if failure is None:
            from lightning_rlhf.stages.measured import metrics_of  # which imports torch

            is_program = cfg.stage is None and not (folder / FINAL).is_dir()  # it leaves no final/
            metrics = {} if is_program else dict(metrics_of(folder / FINAL, stage))
            return replace(result, status="done", metrics=metrics)
    except (RLHFError, OmegaConfBaseException) as error:
        failure = failure or str(error)
        result = JobResult(overrides=overrides)
    return replace(result, status=STOPPED if failure == STOPPED else "failed", failure=failure)


def is_refused(cfg: DictConfig) -> bool:
    """Return whether the configuration of a job has a value that is not allowed."""
    if cfg.stage is None:
        return False
    try:
        read_settings(cfg)
    except ConfigError:
        return True
    return False


def log_of(folder: Path) -> Path:
    """Return the file of the output of a job in a process of its own, beside its folder."""
    return folder.with_name(f"{folder.name}.log")


def alone(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of the command that runs a job of a sweep alone, in the same folder."""
    stage = cfg.stage
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
