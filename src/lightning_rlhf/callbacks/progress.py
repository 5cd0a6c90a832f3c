"""One progress bar over the whole run, or plain lines where there is no terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich import get_console
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from lightning_rlhf.callbacks.contract import is_evaluation, position
from lightning_rlhf.io.console import Pace, Working, clock_text, left_text

LINES = 10
"""Number of plain lines with metrics per run, besides the first one. Lines without metrics are
printed every ten seconds."""


class Progress(ProgressBar):
    """A progress bar with elapsed time, estimated remaining time and the headline metrics.

    It counts iterations of PPO and optimizer steps of the other stages, starting at the step of a
    resumed run. Place it after the callbacks that log the metrics, since it shows those in
    `trainer.callback_metrics`.
    """

    def __init__(self, stage: str, headlines: Sequence[str]) -> None:
        """headlines: names of the metrics that are shown while the stage runs."""
        super().__init__()
        self._stage = stage
        self._shown = headlines
        self._enabled = True
        self._bar: _Bar | None = None
        self._working: Working | None = None
        """Printer of the plain lines of training or evaluation where there is no bar."""
        self._pace = Pace()
        self._total = 0
        """Number of steps of the run; 0 before training starts, as in an evaluation that is due
        when a run resumes."""
        self._mark = monotonic()
        """End of the latest iteration, in seconds of the monotonic clock, moved by the duration of
        evaluations."""
        self._evaluations = 0
        """Number of evaluations left."""

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        get_console().print(*args, **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._total = int(trainer.estimated_stepping_batches)
        self._done = self._first = position(trainer, pl_module)
        self._evaluations = evaluations_left(trainer, self._done, self._total)
        self._start = self._mark = monotonic()
        if self._enabled and get_console().is_terminal:
            self._bar = _Bar(self._stage, self._done, self._total)
            self._bar.start()
        self._tell_training()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        done = position(trainer, pl_module)
        if done == self._done:
            return
        now = monotonic()
        self._pace.add_iteration(now - self._mark)
        self._done, self._mark = done, now
        self._show(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluation_start = monotonic()
        if self._bar is not None:
            self._bar.describe(f"{self._stage} eval")
        elif self._enabled:
            sanity = trainer.sanity_checking
            batches = trainer.num_sanity_val_batches if sanity else trainer.num_val_batches
            total = sum(batches)
            known = int(total) if math.isfinite(total) else None
            self._work(Working(f"{self._stage} evaluation, batches", known))

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._working is not None:
            self._working.advance()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_work()
        if not is_evaluation(trainer):
            return
        seconds = monotonic() - self._evaluation_start
        self._pace.add_evaluation(seconds)
        self._mark += seconds
        self._evaluations = max(0, self._evaluations - 1)
        if self._total and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._tell_training()
        if self._bar is not None:
            self._bar.describe(self._stage)
            self._show(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def _tell_training(self) -> None:
        if self._enabled and self._bar is None:
            self._work(Working(self._stage, line=self._line))

    def _work(self, working: Working) -> None:
        self._end_work()
        self._working = working
        working.start()

    def _line(self) -> str:
        return f"{self._stage} {self._done}/{self._total}  {self._times()}"

    def _end_work(self) -> None:
        if self._working is not None:
            self._working.stop()
            self._working = None

    def _stop(self) -> None:
        self._end_work()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, trainer: Trainer) -> None:
        if self._bar is None and not (self._enabled and self._is_line_due()):
            return
        times = self._times()
        headlines = headline_text(trainer.callback_metrics, self._shown)
        if self._bar is None:
            print(f"{self._line()}  {headlines}", flush=True)
        else:
            self._bar.show(self._done, times, headlines)

    def _times(self) -> str:
        left = self._pace.left(self._total - self._done, self._evaluations)
        return f"{clock_text(monotonic() - self._start)} elapsed, {left_text(left)}"

    def _is_line_due(self) -> bool:
        is_first = self._done == self._first + 1
        before = (self._done - 1) * LINES // self._total
        return is_first or self._done * LINES // self._total > before


def evaluations_left(trainer: Trainer, done: int, total: int) -> int:
    """Return the number of evaluations between step `done` and step `total`."""
    every = trainer.val_check_batch
    if not trainer.enable_validation or every is None or every == float("inf"):
        return 0
    batches = trainer.accumulate_grad_batches
    return int(total * batches // every - done * batches // every)


def headline_text(metrics: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the metrics of these names that have been measured, with their values."""
    shown = (name for name in names if name in metrics)
    return "  ".join(f"{name} {number_text(float(metrics[name]))}" for name in shown)


def number_text(x: float) -> str:
    """Return `x` with three decimals, or with four significant digits if |x| is not in [1e-3, 1e4).

    0 has three decimals.
    """
    is_plain = x == 0 or 1e-3 <= abs(x) < 1e4
    return f"{x:z.3f}" if is_plain else f"{x:.4g}"


class _Bar(RichProgress):
    """A progress bar with a line of metrics below it."""

    def __init__(self, stage: str, done: int, total: int) -> None:
        self._headlines = ""
        super().__init__(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[times]}"),
            console=get_console(),
        )
        self._task = self.add_task(stage, completed=done, total=total, times=left_text(None))

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self._headlines, style="cyan")

    def show(self, done: int, times: str, headlines: str) -> None:
        self._headlines = headlines
        self.update(self._task, completed=done, times=times)

    def describe(self, description: str) -> None:
        self.update(self._task, description=description, refresh=True)
