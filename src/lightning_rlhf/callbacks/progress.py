"""Position of a run in its steps, and one progress bar over it; plain lines without a terminal.

Callbacks read the attributes of a PPOModule (iteration, experience, chat, moments, critic,
collector) without its type, since modules and callbacks do not import each other.
"""

import math
from collections.abc import Sequence
from time import monotonic
from typing import Any, ClassVar

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich import get_console
from rich.progress import TextColumn

from lightning_rlhf.io.console import Bar, Working, clock_text

LINES = 10
"""Number of plain lines with metrics per run, besides the first one. Lines without metrics are
printed every ten seconds."""


def position(trainer: Trainer, pl_module: Any) -> int:
    """Return the number of finished iterations, or of optimizer steps for a module without any.

    Under manual optimization Lightning's `global_step` counts every optimizer step within an
    iteration, and does not count skipped updates.
    """
    return pl_module.iteration if hasattr(pl_module, "iteration") else trainer.global_step


def trained(trainer: Trainer) -> int:
    """Return the number of batches trained on, over all resumes."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)


def is_evaluation(trainer: Trainer) -> bool:
    """Return False in a sanity check over a part of the validation set, else True."""
    return not trainer.sanity_checking or trainer.num_sanity_val_steps == float("inf")


def latest(trainer: Trainer) -> dict[str, float]:
    """Return the latest value of every metric that a callback may monitor."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class Stateful(Callback):
    """A callback whose attributes named in `kept` are in checkpoints, and restored from them."""

    kept: ClassVar[tuple[str, ...]]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


class Progress(ProgressBar):
    """A progress bar with elapsed time, estimated remaining time and the headline metrics.

    It counts iterations of PPO and optimizer steps of the other stages, starting at the step of a
    resumed run. Place it after the callbacks that log the metrics, since it shows those in
    `trainer.callback_metrics`. Lightning's RichProgressBar prints nothing without a terminal, and
    counts the batches of this process alone.
    """

    def __init__(self, stage: str, headlines: Sequence[str]) -> None:
        """headlines: names of the metrics that are shown while the stage runs."""
        super().__init__()
        self._stage = stage
        self._headlines = headlines
        self._enabled = True
        self._total = 0
        """Number of steps of the training; 0 outside of it."""
        self._bar: Bar | None = None
        self._working: Working | None = None
        """Printer of the plain lines of training or evaluation where there is no bar."""

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        get_console().print(*args, **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._total = int(trainer.estimated_stepping_batches)
        self._done = self._first = position(trainer, pl_module)
        self._start = monotonic()
        if self._enabled and get_console().is_terminal:
            times = TextColumn("{task.fields[times]}")
            self._bar = Bar(self._stage, self._total, times, done=self._done)
            self._bar.start()
        self._replace(Working(self._stage, line=self._line))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        before, self._done = self._done, position(trainer, pl_module)
        if self._done == before:
            return
        found = trainer.callback_metrics
        headlines = (f"{n} {metric_text(float(found[n]))}" for n in self._headlines if n in found)
        shown = "  ".join(headlines)
        tenth = self._done * LINES // self._total
        is_due = self._done == self._first + 1 or tenth > (self._done - 1) * LINES // self._total
        if self._bar is not None:
            self._bar.below = shown
            self._bar.show(completed=self._done, times=self._times())
        elif self._enabled and is_due:
            print(f"{self._line()}  {shown}", flush=True)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        batches = trainer.num_val_batches
        if trainer.sanity_checking:
            batches = trainer.num_sanity_val_batches
        known = int(sum(batches)) if math.isfinite(sum(batches)) else None
        self._replace(Working(f"{self._stage} evaluation, batches", known), "eval")

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._working is not None:
            self._working.advance()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._replace(Working(self._stage, line=self._line) if self._total else None)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._replace(None)
        self._total = 0
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def _replace(self, working: Working | None, part: str = "") -> None:
        """Let `working` print from now on, and nothing else; part: of the stage, for the bar."""
        if self._working is not None:
            self._working.stop()
            self._working = None
        if self._bar is not None:
            self._bar.show(description=f"{self._stage} {part}".strip(), refresh=True)
        elif self._enabled and working is not None:
            self._working = working
            working.start()

    def _line(self) -> str:
        return f"{self._stage} {self._done}/{self._total}  {self._times()}"

    def _times(self) -> str:
        """Return the elapsed time, and that of the steps left at the mean pace of this process."""
        elapsed, made = monotonic() - self._start, self._done - self._first
        left = "time left unknown"
        if made:
            left = f"{clock_text(elapsed / made * (self._total - self._done))} left"
        return f"{clock_text(elapsed)} elapsed, {left}"


def metric_text(x: float) -> str:
    """Return `x` with three decimals, or with four significant digits if |x| is not in [1e-3, 1e4).

    0 has three decimals.
    """
    is_plain = x == 0 or 1e-3 <= abs(x) < 1e4
    return f"{x:z.3f}" if is_plain else f"{x:.4g}"
