"""A W&B logger without which a run can continue: a dead W&B process does not end the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_rlhf.callbacks.terminal import print_line

AXIS = "iteration"
"""W&B's x-axis: iterations of PPO, optimizer steps of the other stages."""


class RunWandb(WandbLogger):
    """A W&B logger with the key `iteration` as its x-axis instead of trainer/global_step.

    W&B uploads in a separate process, wandb-core, which also waits for a lost network connection.
    If that process ends before the run does (killed, or out of memory), this logger prints one line
    and logs nothing more.
    """

    is_gone = False
    """True once W&B's process has ended."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        axis = {} if step is None else {AXIS: step}
        self._try(lambda: self.experiment.log({**metrics, **axis}))

    @rank_zero_only
    def alert(self, title: str, text: str) -> None:
        """Send an alert, which W&B shows on the run's page and passes on by mail or Slack."""
        self._try(lambda: self.experiment.alert(title=title, text=text, level="WARN"))

    @rank_zero_only
    def close(self, exit_code: int) -> None:
        """Finish the W&B run, so that the next run in this process starts a new one."""
        self._try(lambda: self.experiment.finish(exit_code=exit_code))
        if self.is_gone:
            forget()

    def _try(self, ask: Callable[[], None]) -> None:
        """Call `ask` unless W&B's process has ended; other errors are raised."""
        if self.is_gone:
            return
        try:
            ask()
        except gone():
            self.is_gone = True
            print_line(
                "W&B: its process has ended; the run goes on without it: metrics.csv has every "
                "row, W&B those before at most"
            )


def forget() -> None:
    """Reset W&B's connection to its ended process, so that the next run starts a new process."""
    import wandb

    with suppress(*gone()):
        wandb.teardown()


def gone() -> tuple[type[Exception], ...]:
    """Return the exceptions that W&B raises when its process has ended."""
    from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

    return ConnectionError, HandleAbandonedError, MailboxClosedError
