"""stage=ppo: proximal policy optimization of a reward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.stages.reward.unfit import verdicts_on
from lightning_rlhf.stages.stage import Settings, Stage

if TYPE_CHECKING:
    from lightning_rlhf.report.curves import Panel


def run(settings: Settings, config: PPOConfig) -> Path:
    """Train a policy from the SFT model and hand it over."""
    from lightning_rlhf.stages.train_ppo import run_ppo  # which imports torch and Lightning

    return run_ppo(settings, config)


def prepare(settings: Settings, config: PPOConfig, *module_class: Any) -> Any:
    """Return the stage before its first iteration, as `train_ppo.prepare_ppo`."""
    from lightning_rlhf.stages.train_ppo import prepare_ppo

    return prepare_ppo(settings, config, *module_class)


def export(settings: Settings, config: PPOConfig, given: Any) -> Path:
    """Write a checkpoint as a folder like `final/`, as `train_ppo.export_ppo`."""
    from lightning_rlhf.stages.train_ppo import export_ppo

    return export_ppo(settings, config, given)


def panels(measured: Collection[str]) -> Sequence[Panel]:
    """Return the panels of curves.png; those of a judge and of components where there are any."""
    from lightning_rlhf.report.curves import ppo_panels

    return ppo_panels(measured)


STAGE = Stage(
    name="ppo",
    title="PPO",
    config=PPOConfig,
    data="prompts",
    run=run,
    prepare=prepare,
    export=export,
    reads_reward=True,
    reads_judge=True,
    check=verdicts_on,
    goal=(("eval/reward_mean", "max"),),
    unit="iteration",
    validates_first=True,
    headlines=("reward_mean", "kl_divergence", "entropy", "ppo_loss"),
    summary=(
        "eval/reward_mean",
        "eval/kl",
        "eval/response_tokens",
        "eval/judge/gold",
        "eval/judge/correct",
    ),
    panels=panels,
    volatile=("kl_warning",),
)
