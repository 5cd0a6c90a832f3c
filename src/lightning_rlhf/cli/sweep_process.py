"""A job of a sweep as a process of its own, which may crash without ending the others."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.callbacks.stop import Stopped
from lightning_rlhf.cli.execute import given_overrides, stage_settings
from lightning_rlhf.cli.job_result import log_of
from lightning_rlhf.cli.overrides import key_of
from lightning_rlhf.cli.recipe import own_configs
from lightning_rlhf.cli.sweep import job_folder, mark_failed
from lightning_rlhf.cli.sweep_hook import SweepHook
from lightning_rlhf.stages.folder.folders import FAILED, refuse_foreign_files
from lightning_rlhf.stages.process import IN_SWEEP, STOPPED, run_command


def run_checked(cfg: DictConfig) -> str | None:
    """Run the job as `run_job`, after a check of its settings, which needs no process."""
    if OmegaConf.select(cfg, "recipe", throw_on_resolution_failure=False) is None:
        stage_settings(cfg, in_sweep=True)
    return run_job(cfg, given_overrides())


def run_job(cfg: DictConfig, overrides: Sequence[str]) -> str | None:
    """Run the job of a sweep in a process of its own. Return why it failed, else None.

    After a signal to the sweep it does not begin.

    Its output goes to `<stage>.log` beside its folder, as jobs may run at the same time.

    Raises Stopped after a signal, when the job has written its checkpoint.
    """
    if SweepHook.results is not None and SweepHook.results.is_stopped:
        return STOPPED
    folder = job_folder(cfg)
    refuse_foreign_files(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder / FAILED).unlink(missing_ok=True)
    log = log_of(folder)
    if SweepHook.results is not None:
        SweepHook.results.start(HydraConfig.get().job.num, overrides, str(folder))
    words = [word for word in overrides if key_of(word) != "job"]
    words += [] if cfg.job is None else [f'job="{cfg.job}"']
    command = [sys.executable, "-m", "lightning_rlhf", *own_configs(), *words]
    with log.open("ab") as output, checkpoint_before_requeue():
        status = run_command(command, {IN_SWEEP: "1"}, output)
    if status == 0:
        return None
    if status < 0:
        return mark_failed(cfg, f"ended by {signal.Signals(-status).name}; its output is in {log}")
    written = folder / FAILED
    if written.is_file():
        return f"{written.read_text().strip()}; its output is in {log}"
    return mark_failed(cfg, f"exit status {status}; its output is in {log}")


@contextmanager
def checkpoint_before_requeue() -> Iterator[None]:
    """End the job after a checkpoint before submitit requeues it, as it does shortly before the
    time limit of the job or when a cluster takes its machine away.

    submitit requeues in its handler of a signal, SIGUSR2 by default. Here the signal becomes a
    SIGTERM to this process, which `run_command` passes on to the job; submitit's handler is called
    once the job has ended.
    """
    requeue: Any = signal.getsignal(signal.SIGUSR2)
    if not callable(requeue):
        yield
        return
    came: list[int] = []

    def end_job(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
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
