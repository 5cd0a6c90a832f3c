"""Optimizer steps through what goes wrong: memory that runs out, gradients that are no numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import lightning as L
import torch
from torch import Tensor, nn

from lightning_rlhf.core.config import StageConfig
from lightning_rlhf.core.errors import NotFiniteError
from lightning_rlhf.core.finite import advice
from lightning_rlhf.core.memory import BatchSize
from lightning_rlhf.core.types import Record
from lightning_rlhf.modules.optim import backward, step

R = TypeVar("R", bound=Record)


def by_row(
    module: L.LightningModule, batch: R, facts: Callable[[R], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The facts of each row of a batch as if it were alone, and the norm of its loss's gradient.

    facts: of a batch of one; "loss" is 0-d and has a gradient. The rows keep the batch's padding.
    Parameters and their gradients stay as they are. It needs a context without inference_mode.

    Returns: `facts` and grad_norm, row after row.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    found: list[dict[str, Tensor]] = []
    for row in batch.split(1):
        with torch.enable_grad():
            of_row = facts(row)
        with torch.autocast(module.device.type, enabled=False):  # as `backward`
            gradient = torch.autograd.grad(of_row["loss"], trained, allow_unused=True)
        norm = nn.utils.get_total_norm([g for g in gradient if g is not None])
        found.append({k: x.detach().reshape(-1) for k, x in {**of_row, "grad_norm": norm}.items()})
    return {name: torch.cat([of_row[name] for of_row in found]) for name in found[0]}


class Learner:
    """How many rows a pass takes now, and how many updates in a row were not made."""

    def __init__(
        self, stage: str, config: StageConfig, microbatch: BatchSize | None = None
    ) -> None:
        """`microbatch`: one that others read by too, for theirs to be halved with it."""
        self.stage = stage
        self.config = config
        self.microbatch = microbatch or BatchSize(
            f"{stage}.microbatch_size", config.microbatch_size
        )
        self.nonfinite = 0
        """Updates in a row whose loss or gradient was not finite."""

    def gradient(
        self, module: L.LightningModule, losses: Callable[[int], Iterable[Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """As `backward`; `losses` are those of a whole batch, by the size of a micro-batch."""
        return self.microbatch.fitting(
            lambda size: backward(module, losses(size), self.config.max_grad_norm)
        )

    def step(self, module: L.LightningModule, loss: Tensor, grad_norm: Tensor) -> bool:
        """Move the parameters, unless the update is not finite; whether it did.

        Raises: as `accepts`.
        """
        is_accepted = self.accepts(module, loss, grad_norm)
        if is_accepted:
            step(module)
        return is_accepted

    def accepts(self, module: L.LightningModule, loss: Tensor, grad_norm: Tensor) -> bool:
        """Whether the two 0-d tensors of an update are finite, and count it if not.

        Warns at the first of several in a row that are not.

        Raises: NotFiniteError at the last of `max_nonfinite` updates in a row that are not.
        """
        if (loss + grad_norm).isfinite():
            self.nonfinite = 0
            return True
        self.nonfinite += 1
        stage, allowed, made = self.stage, self.config.max_nonfinite, module.global_step
        if self.nonfinite == allowed:
            self.nonfinite = 0  # for what goes on from here
            raise NotFiniteError(
                f"{allowed} updates in a row ({stage}.max_nonfinite) had a loss or gradient that "
                f"is not finite (the last: {loss:g}, and a norm of {grad_norm:g}) and were not "
                "made",
                advice(stage, made),
            )
        if self.nonfinite == 1:
            # With the number of those made each text is another one: Python shows each once.
            warnings.warn(
                f"an update was not made, after {made} that were: its loss is "
                f"{loss:g} and the norm of its gradient {grad_norm:g}; update/nonfinite counts "
                f"them, {stage}.max_nonfinite={allowed} in a row end the run",
                stacklevel=2,
            )
        return False

    def state_dict(self) -> dict[str, int]:
        """Plain numbers for a checkpoint."""
        return {"microbatch_size": self.microbatch.rows, "nonfinite": self.nonfinite}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on as a run that was never stopped."""
        self.microbatch.rows, self.nonfinite = state["microbatch_size"], state["nonfinite"]
