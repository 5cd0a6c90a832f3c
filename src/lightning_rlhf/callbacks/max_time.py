"""The end of a run after `trainer.max_time`: with a checkpoint, as after a signal."""

from __future__ import annotations

import signal
from typing import Any

from lightning.pytorch.callbacks import Timer

from lightning_rlhf.callbacks.stop import Stop


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
