"""stage=dpo: direct preference optimization of a policy on preference pairs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.core.config import DPOConfig
from lightning_rlhf.stages.stage import Settings, Stage

if TYPE_CHECKING:
    from lightning_rlhf.report.curves import Panel


def run(settings: Settings, config: DPOConfig) -> Path:
    """Train a policy from the SFT model and hand it over."""
    from lightning_rlhf.stages.supervised import run_dpo  # which imports torch and Lightning

    return run_dpo(settings, config)


def prepare(settings: Settings, config: DPOConfig) -> Any:
    """Return the stage before its first step, as `train_dpo.prepare_dpo`."""
    from lightning_rlhf.stages.supervised import prepare_dpo

    return prepare_dpo(settings, config)


def export(settings: Settings, config: DPOConfig, given: Any) -> Path:
    """Write a checkpoint as a folder like `final/`, as `train_dpo.export_dpo`."""
    from lightning_rlhf.stages.supervised import export_dpo

    return export_dpo(settings, config, given)


def panels(measured: Collection[str]) -> Sequence[Panel]:
    """Return the panels of curves.png."""
    from lightning_rlhf.report.curves import DPO_PANELS

    return DPO_PANELS


STAGE = Stage(
    name="dpo",
    title="Direct preference optimization",
    config=DPOConfig,
    data="preferences",
    run=run,
    prepare=prepare,
    export=export,
    goal=(("eval/dpo_loss", "min"),),
    headlines=("update/dpo_loss", "update/accuracy", "eval/accuracy"),
    summary=("eval/dpo_loss", "eval/accuracy", "eval/reward_margin"),
    panels=panels,
)
