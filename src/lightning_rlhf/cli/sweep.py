"""Sweeps: a folder for each job, jobs that fail alone, one table at the end."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict
from rich import get_console

from lightning_rlhf.cli.folders import FAILED, FINAL, run_folder
from lightning_rlhf.cli.settings import STAGES
from lightning_rlhf.models.checkpoint import find
from lightning_rlhf.report.tables import SweepRow, sweep_table

IN_PATH = ("stage", "model", "run", "outputs", "recipe")
DONE = "done"
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
    """The folder of one job: its overrides, but for what the path says already."""
    kept = [o.lstrip("+~") for o in overrides]
    kept = sorted(o for o in kept if o.split("=")[0] not in (*IN_PATH, *NEUTRAL))
    name = re.sub(r"[^\w.=+,-]", "_", ",".join(kept))
    if len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{zlib.crc32(name.encode()):08x}"
    return name or None


def mark_failed(cfg: DictConfig, reason: str) -> str:
    """Leave the reason in the job's folder, unless a finished run is there. Returns it."""
    folder = _folder(cfg)
    if not (folder / FINAL).is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILED).write_text(reason + "\n")
    return reason


class SweepTable(Callback):
    """Prints what every job of a sweep came to; the exit status tells whether all were fine."""

    def __init__(self) -> None:
        self._rows: list[SweepRow] | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._rows = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if self._rows is not None:
            failure = job_return.return_value
            self._rows.append(_row(job_return.cfg, job_return.overrides or [], failure))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        assert self._rows is not None
        get_console().print(sweep_table(self._rows))
        if any(row.status != DONE for row in self._rows):
            sys.exit(1)


def _folder(cfg: DictConfig) -> Path:
    """Where the job writes; the last stage's folder where it is a whole recipe."""
    stage = cfg.stage if "stage" in cfg else "ppo"
    return run_folder(Path(cfg.outputs), cfg.run, cfg.model.name, stage, cfg.job)


def _row(cfg: Any, overrides: Sequence[str], failure: str | None) -> SweepRow:
    job, final = " ".join(overrides), _folder(cfg) / FINAL
    if failure is None and not final.is_dir():
        failure = f"{final} is missing"
    if failure is not None:
        return SweepRow(overrides=job, status=f"failed: {failure.splitlines()[-1]}", metrics={})
    manifest = find(str(final), "final").manifest
    metrics = manifest.metrics if manifest is not None else {}
    shown = {name: metrics[name] for name in SHOWN if name in metrics}
    return SweepRow(overrides=job, status=DONE, metrics=shown)
