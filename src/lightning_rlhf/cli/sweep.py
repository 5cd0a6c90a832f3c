"""Sweeps: a folder for each job, jobs that fail alone, one table at the end."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich import get_console

from lightning_rlhf.cli.folders import FAILED, FINAL, run_folder
from lightning_rlhf.cli.settings import STAGES
from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.models.checkpoint import find
from lightning_rlhf.report.tables import SweepRow, sweep_table

IN_PATH = ("stage", "model", "run", "outputs", "recipe")
DONE = "done"
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


def job_name(overrides: Sequence[str]) -> str | None:
    """The folder of one job: its overrides, but for what the path says already."""
    kept = [o for o in overrides if o.lstrip("+~").split("=")[0] not in (*IN_PATH, *NEUTRAL)]
    return ",".join(re.sub(r"[^\w.=+-]", "_", o) for o in sorted(kept)) or None


def mark_failed(cfg: DictConfig, error: Exception) -> None:
    """Leave the reason in the job's folder; SweepTable finds it there."""
    folder = _folder(cfg)
    folder.mkdir(parents=True, exist_ok=True)
    text = str(error) if isinstance(error, RLHFError) else traceback.format_exc()
    (folder / FAILED).write_text(text + "\n")


class SweepTable(Callback):
    """Prints what every job of a sweep came to; the exit status tells whether all were fine."""

    def __init__(self) -> None:
        self._rows: list[SweepRow] | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._rows = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if self._rows is not None:
            self._rows.append(_row(job_return.cfg, job_return.overrides or []))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        assert self._rows is not None
        get_console().print(sweep_table(self._rows))
        if any(row.status != DONE for row in self._rows):
            sys.exit(1)


def _folder(cfg: DictConfig) -> Path:
    """Where the job writes; the last stage's folder where it is a whole recipe."""
    stage = next((stage for stage in STAGES if stage in cfg), "ppo")
    return run_folder(Path(cfg.outputs), cfg.run, cfg.model.name, stage, cfg.job)


def _row(cfg: Any, overrides: Sequence[str]) -> SweepRow:
    folder = _folder(cfg)
    failed = folder / FAILED
    if failed.is_file():
        reason = failed.read_text().strip().splitlines()[-1]
        return SweepRow(overrides=" ".join(overrides), status=f"failed: {reason}", metrics={})
    manifest = find(str(folder / FINAL), "final").manifest
    metrics = manifest.metrics if manifest is not None else {}
    shown = {name: metrics[name] for name in SHOWN if name in metrics}
    return SweepRow(overrides=" ".join(overrides), status=DONE, metrics=shown)
