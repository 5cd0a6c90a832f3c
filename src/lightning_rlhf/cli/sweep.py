"""Sweeps: a folder for each job, jobs that fail alone, one table at the end."""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hydra.core.utils import JobReturn
from omegaconf import DictConfig, open_dict
from rich import get_console

from lightning_rlhf.cli.folders import FAILED, FINAL, run_folder
from lightning_rlhf.cli.settings import STAGES
from lightning_rlhf.models.checkpoint import find
from lightning_rlhf.report.fitness_page import NUMBERS
from lightning_rlhf.report.tables import SweepRow, sweep_table

IN_PATH = ("stage", "model", "run", "outputs", "recipe")
LONGEST = 120
"""Characters of a job's name; file systems allow 255 bytes."""
SHOWN = (
    "eval/loss",
    "eval/rm_loss",
    "eval/accuracy",
    "eval/reward_mean",
    "eval/kl",
    "eval/response_tokens",
    "eval/judge/gold",
    "eval/judge/correct",
    "fitness/accuracy",
    "fitness/length_gap",
    "fitness/flags",
)
NEUTRAL = ("resume", "overwrite", "debug", "logger", "trainer")


def adapt(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Give the job its folder, and take out the numbers that are for other stages of the sweep."""
    with open_dict(cfg):
        cfg.job = job_name(overrides)
        if "stage" in cfg:
            for other in set(STAGES) & set(cfg) - {cfg.stage}:
                del cfg[other]


def job_name(overrides: Sequence[str]) -> str | None:
    """The folder of one job: its overrides, but for what the path says already.

    seed=1 ppo.kl_coef=0.1 -> ppo.kl_coef-0.1+seed-1, which needs no quotes in another command.
    """
    kept = [o.lstrip("+~") for o in overrides]
    kept = sorted(o for o in kept if o.split("=")[0] not in (*IN_PATH, *NEUTRAL))
    name = re.sub(r"[^\w.+-]", "-", "+".join(kept))
    if len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{zlib.crc32(name.encode()):08x}"
    return name or None


def mark_failed(cfg: DictConfig, reason: str) -> str:
    """Leave the reason in the job's folder, unless a finished run is there. Returns it."""
    if not isinstance(cfg.outputs, str):
        return reason
    folder = _folder(cfg)
    is_inside = Path(os.path.abspath(folder)).is_relative_to(os.path.abspath(cfg.outputs))
    if is_inside and not (folder / FINAL).is_dir():
        with suppress(OSError):  # a folder that cannot be written may be the reason itself
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FAILED).write_text(reason + "\n")
    return reason


class SweepTable:
    """Prints what every job of a sweep came to; the exit status tells whether all were fine."""

    def __init__(self) -> None:
        self._rows: list[SweepRow] = []
        self._failures: dict[str, str] = {}
        """Overrides of a job -> why it failed."""

    def add(self, job_return: JobReturn) -> None:
        """Note what a job came to."""
        overrides = tuple(o.lstrip("+") for o in job_return.overrides or [])
        failure = job_return.return_value
        metrics: Mapping[str, float] = {}
        if failure is None:
            final = _folder(job_return.cfg) / FINAL  # type: ignore[arg-type]
            if final.is_dir():
                metrics = metrics_of(final)
            else:
                failure = f"{final} is missing"
        if failure is not None:
            self._failures[" ".join(overrides)] = failure
        status = "done" if failure is None else "failed"
        shown = {name: metrics[name] for name in SHOWN if name in metrics}
        self._rows.append(SweepRow(overrides=overrides, status=status, metrics=shown))

    def show(self) -> None:
        """Print the table and what failed, which ends the command with status 1."""
        if self._rows:
            get_console().print(sweep_table(self._rows))
        for job, failure in self._failures.items():
            print(f"failed: {job}: {failure}")
        if self._failures:
            sys.exit(1)


def metrics_of(final: Path) -> Mapping[str, float]:
    """What the stage came to, by the names of metrics."""
    numbers = final / NUMBERS
    if final.parent.name == "eval":
        found: dict[str, float] = json.loads(numbers.read_text())["metrics"]
        return found
    return find(str(final), "final").require_manifest(final.parent.name).metrics


def _folder(cfg: DictConfig) -> Path:
    """Where the job writes; the last stage's folder where it is a whole recipe."""
    stage = cfg.stage if "stage" in cfg else "ppo"
    job = None if cfg.job is None else str(cfg.job)
    return run_folder(Path(cfg.outputs), str(cfg.run), str(cfg.model.name), stage, job)
