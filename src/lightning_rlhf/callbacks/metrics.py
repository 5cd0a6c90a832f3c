"""Callbacks that turn what a step returns into logged metrics, in every process of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from lightning_rlhf.callbacks.compute import CountedRows, iteration_totals, peak_memory, step_totals
from lightning_rlhf.callbacks.contract import is_evaluation, position, ppo_view
from lightning_rlhf.callbacks.step_metrics import (
    Phase,
    dpo_metrics,
    dpo_sums,
    groups_alike,
    repetition_metrics,
    response_sums,
    reward_metrics,
    reward_sums,
    rollout_metrics,
    sft_eval_sums,
    sft_metrics,
    sft_train_sums,
    time_metrics,
    update_metrics,
    update_rows,
)
from lightning_rlhf.core.metrics import PART, check_names
from lightning_rlhf.core.results import RESULT, DPOStep, IterationResult, RewardStep, SFTStep
from lightning_rlhf.core.shaping import paid_sum
from lightning_rlhf.parallel.replicas import Replicas


def publish(trainer: Trainer, pl_module: LightningModule, metrics: Mapping[str, float]) -> None:
    """Give metrics to every logger and to `trainer.callback_metrics`, where others monitor them."""
    check_names(metrics)
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=position(trainer, pl_module))
    pl_module.log_dict(dict(metrics), logger=False)


def learning_rate(trainer: Trainer) -> float:
    """Return the learning rate of the first parameter group, the policy's."""
    return float(trainer.optimizers[0].param_groups[0]["lr"])


class PPOMetrics(CountedRows):
    """Metrics of every iteration."""

    unit = "iteration"

    def state_dict(self) -> dict[str, Any]:
        return {"compute": self._compute.totals}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._compute.totals = state_dict["compute"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ppo_view(pl_module).logs_headline = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._lr = learning_rate(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        result: IterationResult = outputs[RESULT]
        sums = response_sums(result.experience).cpu()
        rows = update_rows(result.updates).cpu()
        metrics = {
            **rollout_metrics(sums),
            **repetition_metrics(result.experience),
            **update_metrics(rows),
            "update/lr": self._lr,
            "update/kl_coef": result.kl_coef,
            "rollout/padding": result.padding.item(),
            **time_metrics(result.seconds, sums),
            **self._compute.add(
                iteration_totals(pl_module, result, trainer.world_size),
                peak_memory(pl_module.device),
            ),
        }
        if result.group_size > 1:
            metrics["rollout/groups_alike"] = groups_alike(sums, result.group_size)
        module = ppo_view(pl_module)
        terms = module.reward.terms
        parts = result.experience.component_scores.cpu()
        if not all(term.is_paid_as_reported for term in terms):
            paid = paid_sum(parts, terms, module.moments.components)
            metrics["rollout/reward_paid"] = paid.mean().item()
            metrics["rollout/reward_paid_range"] = (paid.max() - paid.min()).item()
        if len(terms) > 1:
            columns = {term.name: part for term, part in zip(terms, parts.T, strict=True)}
            metrics |= {PART + name: part.mean().item() for name, part in columns.items()}
            draw_histograms(trainer, pl_module, columns)
        publish(trainer, pl_module, metrics)


def draw_histograms(
    trainer: Trainer, pl_module: LightningModule, columns: Mapping[str, Tensor]
) -> None:
    """Log the numbers of each component of the reward to loggers that draw histograms."""
    step = position(trainer, pl_module)
    for logger in trainer.loggers:
        for name, numbers in columns.items():
            if isinstance(logger, WandbLogger):
                import wandb

                histogram: Any = wandb.Histogram(numbers.tolist())
                logger.log_metrics({f"histogram/reward/{name}": histogram}, step=step)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_histogram(f"histogram/reward/{name}", numbers, step)


Sums = Callable[[Any], Tensor]
"""Sums that a metric follows from, of the record that a step returned."""


class SummedMetrics(CountedRows):
    """Metrics of a supervised stage, exact over all that was summed.

    Training metrics appear every `trainer.log_every_n_steps` and at the last step, and cover as
    many of the latest steps each time, or all where a run has fewer: the point at the last step is
    a mean like the others. Validation metrics cover the whole validation set.
    """

    def __init__(
        self,
        train_sums: Sums,
        eval_sums: Sums,
        means: Callable[[Sequence[float], Phase], dict[str, float]],
    ) -> None:
        super().__init__()
        self._train_sums, self._eval_sums, self._means = train_sums, eval_sums, means
        self._training: list[Tensor] = []
        """Sums of each batch that the next row covers; zeros where an update was not made."""
        self._nonfinite = 0
        """Updates that were not made since the last row."""
        self._logged_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ppo_view(pl_module).logs_headline = False

    def state_dict(self) -> dict[str, Any]:
        training = [sums.cpu() for sums in self._training]
        return {
            "training": training,
            "nonfinite": self._nonfinite,
            "logged_step": self._logged_step,
            "compute": self._compute.totals,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._training, self._logged_step = state_dict["training"], state_dict["logged_step"]
        self._nonfinite = state_dict["nonfinite"]
        self._compute.totals = state_dict["compute"]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._lr = learning_rate(trainer)
        self._started = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        result: SFTStep | RewardStep | DPOStep = outputs[RESULT]
        sums = self._train_sums(result)
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._training.append(sums if result.is_made else torch.zeros_like(sums))
        del self._training[: -every * trainer.accumulate_grad_batches]
        self._nonfinite += not result.is_made
        seconds = time.perf_counter() - self._started
        totals = step_totals(pl_module, batch, seconds, trainer.world_size)
        computed = self._compute.add(totals, peak_memory(pl_module.device))
        step = position(trainer, pl_module)
        is_due = step % every == 0 or step == trainer.estimated_stepping_batches
        if step == self._logged_step or not is_due:
            return
        metrics = self._means(_totals(self._training), "update")
        metrics["update/lr"] = self._lr
        metrics["update/nonfinite"] = float(self._nonfinite)
        metrics["update/grad_norm"] = result.grad_norm.item()
        metrics |= computed
        publish(trainer, pl_module, metrics)
        self._nonfinite, self._logged_step = 0, step

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation: list[Tensor] = []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._validation.append(self._eval_sums(outputs))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_evaluation(trainer):
            metrics = self._means(_totals(self._validation), "eval")
            publish(trainer, pl_module, metrics)


class SFTMetrics(SummedMetrics):
    """Loss and perplexity."""

    def __init__(self) -> None:
        super().__init__(sft_train_sums, sft_eval_sums, sft_metrics)


class RewardMetrics(SummedMetrics):
    """Loss, accuracy and rewards of a reward model."""

    def __init__(self) -> None:
        super().__init__(reward_sums, reward_sums, reward_metrics)


class DPOMetrics(SummedMetrics):
    """Loss, accuracy, implicit rewards and log-probabilities of direct preference optimization."""

    def __init__(self) -> None:
        super().__init__(dpo_sums, dpo_sums, dpo_metrics)


def _totals(sums: Sequence[Tensor]) -> list[float]:
    """Return column sums over batches. Those of a checkpoint come from the CPU."""
    total: list[float] = torch.stack([row.to(sums[-1].device) for row in sums]).sum(dim=0).tolist()
    return total


class SharedMetrics(Callback):
    """Gives every process the `trainer.callback_metrics` of the first, so that rules agree in all.

    Place it after the callbacks that log metrics, which the first process alone has.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ppo_view(pl_module).logs_headline = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int,
    ) -> None:  # fmt: skip
        self.share(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_evaluation(trainer):
            self.share(trainer)

    def share(self, trainer: Trainer) -> None:
        """Take the metrics of the first process for those of this one, unless this is it.

        `LightningModule.log` would take longer for all of them than a step of a small model.
        """
        found = self.replicas.first(
            lambda: {name: float(value) for name, value in trainer.callback_metrics.items()}
        )
        if not self.replicas.is_first:
            trainer.callback_metrics.update(
                {name: torch.tensor(value) for name, value in found.items()}
            )
