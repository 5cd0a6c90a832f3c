"""W&B as a logger that a run can do without: where W&B is gone, the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_rlhf.callbacks.console import say

AXIS = "iteration"
"""W&B's x-axis: iterations of PPO, optimizer steps of the other stages."""


class RunWandb(WandbLogger):
    """W&B with the key `iteration` as its x-axis in place of trainer/global_step.

    W&B sends in a process of its own, wandb-core, and waits there for a network that is away. If
    that process ends before the run does (killed, or out of memory), one line says so and nothing
    more is logged here.
    """

    is_gone = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        axis = {} if step is None else {AXIS: step}
        self._try(lambda: self.experiment.log({**metrics, **axis}))

    @rank_zero_only
    def close(self, exit_code: int) -> None:
        """Finish the W&B run, so that the next run in this process gets its own."""
        self._try(lambda: self.experiment.finish(exit_code=exit_code))
        if self.is_gone:
            forget()

    def _try(self, ask: Callable[[], None]) -> None:
        """Ask W&B for something, unless it is gone; what else fails is raised."""
        if self.is_gone:
            return
        try:
            ask()
        except gone():
            self.is_gone = True
            say(
                "W&B: its process has ended; the run goes on without it: metrics.csv has every "
                "row, W&B those before at most"
            )


def forget() -> None:
    """Let W&B look no more for a process that has ended, and start another for the next run."""
    import wandb

    with suppress(*gone()):
        wandb.teardown()


def gone() -> tuple[type[Exception], ...]:
    """What W&B raises where its process does not answer any more."""
    from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

    return ConnectionError, HandleAbandonedError, MailboxClosedError
