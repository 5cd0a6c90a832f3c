"""Early stopping, a limit of time, and weights averaged over steps."""

import math
import signal
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_rlhf.callbacks import progress
from lightning_rlhf.callbacks.stop import Stop
from lightning_rlhf.core import errors, ppo_config
from lightning_rlhf.core.config import Mode, StopConfig
from lightning_rlhf.core.metrics import KL, SIGNS, require_metrics, signed
from lightning_rlhf.parallel import sharding

AVERAGE = "averaged_weights"
"""Checkpoint key of the average of each weight, by its name in `state_dict`."""


class CheckMonitors(Callback):
    """Checks the metric of every EarlyStopping of the user. Place it before them."""

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        logged = trainer.callback_metrics
        for own in trainer.early_stopping_callbacks:
            if own is not None and own.strict:
                key, allowed = f"the monitor of {type(own).__name__}", ", ".join(sorted(logged))
                errors.require(own.monitor in logged, key, own.monitor, allowed or "none")


@dataclass(eq=False)
class EarlyStop(progress.Stateful):
    """Ends a run where an evaluation metric no longer gains, or where the KL is above a bound.

        value_i = +metric or -metric at evaluation i, so that the largest is the best
        gain at i where value_i > value at the last gain + min_gain, with -inf before the first
        end where `patience` evaluations in a row have no gain, or kl_divergence > max_kl

    Evaluations before the first step do not count. Place this callback before Checkpoints, whose
    checkpoint of the last step then holds the reason: a resumed run ends at the same step. After an
    evaluation it is the checkpoint before it that remains, and the evaluation is repeated.
    """

    kept: ClassVar[tuple[str, ...]] = ("best", "best_step", "without", "reason")
    section: str
    """Name of the stage, for the reason."""
    config: StopConfig
    metric: tuple[str, Mode] | None
    """Name and direction of the metric that has to gain; None without `patience`."""
    best: float = -math.inf
    """Value at the last gain, with the sign by which the largest is the best."""
    best_step: int | None = None
    """Step of the last gain."""
    without: int = 0
    """Number of evaluations since the last gain."""
    reason: str | None = None
    """Why the run ended; None while it has not."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """End a run at once that a rule has ended, and that is resumed to write `final/`."""
        trainer.should_stop = trainer.should_stop or self.reason is not None

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        largest = self.config.max_kl if isinstance(self.config, ppo_config.PPOStopConfig) else None
        if largest is not None and (kl := float(trainer.callback_metrics[KL])) > largest:
            limit = f"{self.section}.stop.max_kl={largest:g}"
            self.end(trainer, f"{KL} is {progress.metric_text(kl)} nats a response, above {limit}")

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        is_over = self.config.patience is None or self.reason is not None
        if is_over or self.metric is None or not progress.is_evaluation(trainer):
            return
        name, mode = self.metric
        metrics = progress.latest(trainer)
        require_metrics(f"{self.section}.stop.metric", [self.metric], metrics)
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        value = signed(metrics[name], mode)
        if value > self.best + self.config.min_gain:
            self.best, self.best_step, self.without = value, progress.trained(trainer), 0
            return
        self.without += 1
        if self.without == self.config.patience:
            since = ""
            if self.best_step is not None:
                best = progress.metric_text(SIGNS[mode] * self.best)
                since = f" since {best} at step {self.best_step}"
            count = errors.counted(self.without, "evaluation")
            reason = f"{name} has not gained more than {self.config.min_gain:g}{since}, in {count}"
            self.end(trainer, f"{reason} ({self.section}.stop.patience)")

    def end(self, trainer: Trainer, why: str) -> None:
        """End the run after this step."""
        self.reason = self.reason or why
        trainer.should_stop = True


class MaxTime(Timer):
    """Tells `stop` when the time of this process is over. Put it before Checkpoints.

    Lightning's Timer ends the run as if it had finished, and counts the time before a resume.
    """

    def __init__(self, duration: Any, stop: Stop) -> None:
        """duration: as of lightning.pytorch.callbacks.Timer, such as "00:12:00:00"."""
        super().__init__(duration)
        self.stop = stop

    def on_fit_start(self, *args: Any, **kwargs: Any) -> None:
        """Let the first step be taken in any case."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        left = self.time_remaining()
        if left is not None and left <= 0:
            self.stop.signal = signal.SIGTERM

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep no time of an earlier process."""


class WeightAverage(Callback):
    """Averages the trained weights of a module's `roles` over optimizer steps.

        average_1 = weights_1
        average_k = decay * average_{k-1} + (1 - decay) * weights_k

    weights_k are those after the k-th optimizer step of the run: the average is one over about
    1 / (1 - decay) steps. Validations are of the average, and the module has it after
    `Trainer.fit`. Checkpoints hold the trained weights, from which a run resumes, and the average.
    Source: Tarvainen and Valpola 2017, section 2, https://arxiv.org/abs/1703.01780
    Departs: the average starts at the weights after the first step, as in torch.optim.swa_utils.
    """

    def __init__(self, decay: float) -> None:
        """Make the callback before the first step; decay: above 0 and below 1."""
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        """Average of each weight; empty before the first step. While the module has the average,
        the trained weights."""
        self._update = get_ema_multi_avg_fn(decay)
        self._is_swapped = False

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Average after every step of the optimizer from now on.

        Raises ConfigError where the module trains no weights in `roles`.
        """
        weights = averaged_weights(pl_module)
        allowed = f"null for {type(pl_module).__name__}, which trains no weights in `roles`"
        errors.require(bool(weights), "ema_decay", self.decay, allowed)
        # Those of a checkpoint come on the CPU.
        parts = self.average.items()
        self.average = {n: sharding.part_of(x, weights[n]).to(weights[n].device) for n, x in parts}
        trainer.optimizers[0].register_step_post_hook(lambda *_: self.update(pl_module))

    def update(self, module: LightningModule) -> None:
        """Take the present weights into the average."""
        weights = averaged_weights(module)
        if self.average:
            before, now = ([*map(sharding.local_part, x.values())] for x in (self.average, weights))
            self._update(before, now, 0)  # no effect of a count
        else:
            self.average = {name: x.clone() for name, x in weights.items()}

    def swap(self, module: Any) -> None:
        """Exchange the module's weights and `average`, unless no step was made."""
        with torch.inference_mode(False), torch.no_grad():
            for name, weights in averaged_weights(module).items():
                if name in self.average:
                    before = weights.clone()
                    weights.copy_(self.average[name])
                    self.average[name].copy_(before)
        module.weights_version = getattr(module, "weights_version", 0) + 1
        self._is_swapped = not self._is_swapped

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.swap(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.swap(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if self._is_swapped:
            self.swap(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Leave the average in the module. Called also where a resumed run has no batch left."""
        self.swap(pl_module)
        self.average, self._is_swapped = {}, False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        if self.average:
            checkpoint[AVERAGE] = sharding.whole_tensors(dict(self.average))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        if AVERAGE in checkpoint:  # there is none before the first step
            self.average = {name: x.clone() for name, x in checkpoint[AVERAGE].items()}


def averaged_weights(module: LightningModule) -> dict[str, Tensor]:
    """Return the weights that are averaged, those trained in `module.roles`, without a graph.

    They share the memory of the module's parameters, whose names are the keys.
    """
    return {
        name: parameter.detach()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name.startswith("roles.")
    }
