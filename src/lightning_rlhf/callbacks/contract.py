"""Protocols of the modules that callbacks read, and checks of the metrics and weights they get."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import lightning as L
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_rlhf.core.config import Stage
from lightning_rlhf.core.errors import ConfigError, DivergedError
from lightning_rlhf.core.metrics import JUDGE
from lightning_rlhf.core.records import Experience
from lightning_rlhf.core.shaping import ScoreMoments
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.rewards.weighted import Reward


class PPOView(Protocol):
    """The attributes of a PPO module that callbacks read."""

    iteration: int
    """Number of finished iterations, over all resumes."""
    experience: Experience | None
    """Experience of the current iteration, or of the latest one between iterations."""
    chat: ChatFormat
    """Decoder of responses."""
    reward: Reward
    """Reward that the policy is trained on."""
    moments: ScoreMoments
    """Running moments of all scores so far."""
    logs_headline: bool
    """False where a callback logs the headline metrics, so that the module does not."""
    critic: object | None
    """Value function; None without a critic."""

    def prompt_rows(self, split: Literal["train", "val"]) -> Sequence[Mapping[str, Any]]: ...


def ppo_view(pl_module: LightningModule) -> PPOView:
    """Return the module, typed as PPOView."""
    return cast(PPOView, pl_module)


def position(trainer: Trainer, pl_module: LightningModule) -> int:
    """Return the number of finished iterations, or of optimizer steps for a module without any.

    Under manual optimization Lightning's `global_step` counts every optimizer step within an
    iteration, and does not count skipped updates.
    """
    if hasattr(pl_module, "iteration"):
        return ppo_view(pl_module).iteration
    return trainer.global_step


def is_evaluation(trainer: Trainer) -> bool:
    """Return False in a sanity check over a part of the validation set, else True."""
    return not trainer.sanity_checking or trainer.num_sanity_val_steps == float("inf")


def require_finite_metrics(
    stage: Stage, step: int, made: int, metrics: Mapping[str, float]
) -> None:
    """Raise DivergedError unless the metrics of the evaluation after `step` are finite.

    made: number of optimizer steps so far. Numbers of a judge are not checked.
    """
    found = [
        f"{name} is {value:g}"
        for name, value in metrics.items()
        if name.startswith("eval/") and not name.startswith(JUDGE) and not math.isfinite(value)
    ]
    if found:
        raise DivergedError(
            f"{stage} has diverged: after step {step}, {' and '.join(found)}. "
            f"{divergence_advice(stage, made)}"
        )


def require_finite_weights(
    stage: Stage, step: int, made: int, weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Raise DivergedError unless every tensor of `weights`, with their names, is finite."""
    weights = list(weights)
    found = [name for name, tensor in weights if not tensor.isfinite().all()]
    if found:
        raise DivergedError(
            f"{stage} has diverged: after step {step}, {len(found)} of {len(weights)} trained "
            f"parameters are NaN or infinite (the first: {found[0]}). "
            f"{divergence_advice(stage, made)}"
        )


def divergence_advice(stage: str, made: int) -> str:
    """Return what to do about numbers that are not finite after `made` optimizer steps."""
    if made == 0:
        reward = ", or a reward of enormous size" * (stage == "ppo")
        return (
            "No update was made before them, so that no learning rate did this: it is the model "
            f"that the run starts from, or its data{reward}"
        )
    reward = ", and so does a reward of enormous size" * (stage == "ppo")
    beside = "run=NAME" if stage == "sft" else "job=NAME"  # which finds what it starts from
    return (
        f"A learning rate that is too large does this{reward}. Start over (overwrite=true or "
        f"{beside}) with a smaller {stage}.lr: a resumed run keeps its numbers"
    )


class CheckMonitors(Callback):
    """Callback that checks the metric of every EarlyStopping. Place it before them."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logged = trainer.callback_metrics
        for callback in trainer.early_stopping_callbacks:
            if callback is not None and callback.strict and callback.monitor not in logged:
                raise ConfigError(
                    f"the metric that {type(callback).__name__} monitors is {callback.monitor!r}, "
                    f"which was not logged; allowed: {', '.join(sorted(logged)) or 'none'}"
                )
