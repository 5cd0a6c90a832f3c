"""Updates that go wrong: memory that runs out, and losses or gradients that are not finite."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import lightning as L
from torch import Tensor

from lightning_rlhf.core.config import StageConfig
from lightning_rlhf.core.device_memory import MicrobatchSize
from lightning_rlhf.core.errors import LogitsError, NotFiniteError, PolicyLogitsError

T = TypeVar("T")


def halving_microbatches(method: Callable[..., T]) -> Callable[..., T]:
    """Repeat a module's method with smaller micro-batches as long as the memory runs out.

    The method reads their size, `self.guard.microbatch.rows`, at each call, and leaves nothing
    behind where it fails.
    """

    @wraps(method)
    def repeated(self: Any, *args: Any, **kwargs: Any) -> T:
        microbatch: MicrobatchSize = self.guard.microbatch
        return microbatch.fitting(lambda _: method(self, *args, **kwargs))

    return repeated


class UpdateGuard:
    """Finds a micro-batch size that fits into memory, and rejects updates that are not finite."""

    def __init__(
        self, stage: str, config: StageConfig, microbatch: MicrobatchSize | None = None
    ) -> None:
        """Make the guard; microbatch: size shared with other models, halved for all at once."""
        self.stage = stage
        self.config = config
        self.microbatch = microbatch or MicrobatchSize(
            f"{stage}.microbatch_size", config.microbatch_size
        )
        self.nonfinite = 0
        """Number of updates in a row whose loss or gradient was not finite."""

    def check_finite(self, module: L.LightningModule, loss: Tensor, grad_norm: Tensor) -> bool:
        """Return whether the loss and the gradient norm of an update, 0-d, are finite.

        Counts updates in a row that are not, and warns at the first of them.

        Raises: NotFiniteError at the last of `max_nonfinite` updates in a row that are not.
        """
        if (loss + grad_norm).isfinite():
            self.nonfinite = 0
            return True
        self.nonfinite += 1
        stage, allowed, made = self.stage, self.config.max_nonfinite, module.global_step
        if self.nonfinite == allowed:
            self.nonfinite = 0  # for a run that resumes here
            raise NotFiniteError(
                stage, in_a_row=allowed, loss=float(loss), grad_norm=float(grad_norm), made=made
            )
        if self.nonfinite == 1:
            # The number of updates made keeps texts different: Python shows each text once.
            warnings.warn(
                f"an update was not made, after {made} that were: its loss is "
                f"{loss:g} and the norm of its gradient {grad_norm:g}; update/nonfinite counts "
                f"them, {stage}.max_nonfinite={allowed} in a row end the run",
                stacklevel=2,
            )
        return False

    @contextmanager
    def naming(self, where: str, *, iterations: int) -> Iterator[None]:
        """Raise PolicyLogitsError in place of a LogitsError of the sampling inside the block.

        Args:
            where: iteration or evaluation that samples.
            iterations: number of finished iterations.
        """
        try:
            yield
        except LogitsError as error:
            raise PolicyLogitsError(
                where, iterations=iterations, nonfinite=self.nonfinite
            ) from error

    def state_dict(self) -> dict[str, int]:
        """Return the state as plain numbers for a checkpoint."""
        return {"microbatch_size": self.microbatch.rows, "nonfinite": self.nonfinite}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the state of a checkpoint."""
        self.microbatch.rows, self.nonfinite = state["microbatch_size"], state["nonfinite"]
