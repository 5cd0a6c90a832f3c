"""stage=rm: a reward model from preference pairs, with its scale and its fitness report."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.core.config import RMConfig
from lightning_rlhf.stages.stage import Settings, Stage

if TYPE_CHECKING:
    from lightning_rlhf.report.curves import Panel


def run(settings: Settings, config: RMConfig) -> Path:
    """Train a reward model on the SFT model and hand it over."""
    from lightning_rlhf.stages.train_rm import run_rm  # which imports torch and Lightning

    return run_rm(settings, config)


def prepare(settings: Settings, config: RMConfig) -> Any:
    """Return the stage before its first step, as `train_rm.prepare_rm`."""
    from lightning_rlhf.stages.train_rm import prepare_rm

    return prepare_rm(settings, config)


def export(settings: Settings, config: RMConfig, given: Any) -> Path:
    """Write a checkpoint as a folder like `final/`, as `train_rm.export_rm`."""
    from lightning_rlhf.stages.train_rm import export_rm

    return export_rm(settings, config, given)


def panels(measured: Collection[str]) -> Sequence[Panel]:
    """Return the panels of curves.png."""
    from lightning_rlhf.report.curves import RM_PANELS

    return RM_PANELS


STAGE = Stage(
    name="rm",
    title="Reward model",
    config=RMConfig,
    data="preferences",
    run=run,
    prepare=prepare,
    export=export,
    goal=(("eval/accuracy", "max"), ("eval/rm_loss", "min")),
    headlines=("update/rm_loss", "update/accuracy", "eval/accuracy"),
    summary=("eval/rm_loss", "eval/accuracy"),
    panels=panels,
)
