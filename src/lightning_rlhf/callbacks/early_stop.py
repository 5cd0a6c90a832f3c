"""The end of a run by a rule, before its last step."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from lightning_rlhf.callbacks.checkpoints import trained
from lightning_rlhf.callbacks.contract import is_evaluation
from lightning_rlhf.callbacks.goal import SIGNS, require_metrics, signed
from lightning_rlhf.callbacks.progress import number_text
from lightning_rlhf.core.config import Mode, StopConfig
from lightning_rlhf.core.ppo_config import PPOStopConfig
from lightning_rlhf.core.wording import counted


class EarlyStop(Callback):
    """Ends a run where an evaluation metric no longer gains, or where the KL is above a bound.

        value_i = +metric or -metric at evaluation i, so that the largest is the best
        gain at i where value_i > value at the last gain + min_gain, with -inf before the first
        end where `patience` evaluations in a row have no gain, or kl_divergence > max_kl

    Evaluations before the first step do not count. Place this callback before Checkpoints, whose
    checkpoint of the last step then holds the reason: a resumed run ends at the same step. After an
    evaluation it is the checkpoint before it that remains, and the evaluation is repeated.
    """

    def __init__(self, section: str, config: StopConfig, metric: tuple[str, Mode] | None) -> None:
        """Set up the rules.

        section: name of the stage, for the reason.
        metric: name and direction of the metric that has to gain; None without `patience`.
        """
        self.section = section
        self.config = config
        self.metric = metric
        self.best = -math.inf
        """Value at the last gain, with the sign by which the largest is the best."""
        self.best_step: int | None = None
        """Step of the last gain."""
        self.without = 0
        """Number of evaluations since the last gain."""
        self.reason: str | None = None
        """Why the run ended; None while it has not."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best, "best_step": self.best_step, "without": self.without,
            "reason": self.reason,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a run at once that a rule has ended, and that is resumed to be handed over."""
        trainer.should_stop = trainer.should_stop or self.reason is not None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int,
    ) -> None:  # fmt: skip
        largest = self.config.max_kl if isinstance(self.config, PPOStopConfig) else None
        if largest is None:
            return
        kl = float(trainer.callback_metrics["kl_divergence"])
        if kl > largest:
            self.end(
                trainer,
                f"kl_divergence is {number_text(kl)} nats a response, above "
                f"{self.section}.stop.max_kl={largest:g}",
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_over = self.config.patience is None or self.reason is not None
        if is_over or self.metric is None or not is_evaluation(trainer):
            return
        name, mode = self.metric
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        require_metrics(f"{self.section}.stop.metric", [self.metric], metrics)
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        value = signed(metrics[name], mode)
        if value > self.best + self.config.min_gain:
            self.best, self.best_step, self.without = value, trained(trainer), 0
            return
        self.without += 1
        if self.without == self.config.patience:
            since = (
                ""
                if self.best_step is None
                else (f" since {number_text(SIGNS[mode] * self.best)} at step {self.best_step}")
            )
            self.end(
                trainer,
                f"{name} has not gained more than {self.config.min_gain:g}{since}, in "
                f"{counted(self.without, 'evaluation')} ({self.section}.stop.patience)",
            )

    def end(self, trainer: Trainer, why: str) -> None:
        """End the run after this step."""
        if self.reason is None:
            self.reason = why
        trainer.should_stop = True
