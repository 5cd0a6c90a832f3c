"""stage=sft: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.core.config import SFTConfig
from lightning_rlhf.stages.stage import Settings, Stage

if TYPE_CHECKING:
    from lightning_rlhf.report.curves import Panel


def run(settings: Settings, config: SFTConfig) -> Path:
    """Fine-tune a language model and hand it over as the SFT model."""
    from lightning_rlhf.stages.supervised import run_sft  # which imports torch and Lightning

    return run_sft(settings, config)


def prepare(settings: Settings, config: SFTConfig) -> Any:
    """Return the stage before its first step, as `train_sft.prepare_sft`."""
    from lightning_rlhf.stages.supervised import prepare_sft

    return prepare_sft(settings, config)


def export(settings: Settings, config: SFTConfig, given: Any) -> Path:
    """Write a checkpoint as a folder like `final/`, as `train_sft.export_sft`."""
    from lightning_rlhf.stages.supervised import export_sft

    return export_sft(settings, config, given)


def panels(measured: Collection[str]) -> Sequence[Panel]:
    """Return the panels of curves.png."""
    from lightning_rlhf.report.curves import SFT_PANELS

    return SFT_PANELS


STAGE = Stage(
    name="sft",
    title="Supervised fine-tuning",
    config=SFTConfig,
    data="demonstrations",
    run=run,
    prepare=prepare,
    export=export,
    reads_sft=False,
    goal=(("eval/loss", "min"),),
    headlines=("update/loss", "eval/loss"),
    summary=("eval/loss",),
    panels=panels,
)
