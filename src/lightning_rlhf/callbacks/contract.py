"""The part of a module that callbacks read, and the position of a run on its x-axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast

from lightning.pytorch import LightningModule, Trainer

from lightning_rlhf.core.shaping import ScoreMoments, Term
from lightning_rlhf.core.types import IterationBatch


class Chat(Protocol):
    """Turns tokens into text."""

    def decode_response(self, tokens: list[int]) -> str: ...


class Reward(Protocol):
    """What the policy is paid."""

    @property
    def terms(self) -> Sequence[Term]: ...


class PPOView(Protocol):
    """The part of a PPO module that callbacks read."""

    iteration: int
    """Number of finished iterations; survives a resume."""
    batch: IterationBatch | None
    """Batch that the current or the latest iteration learns from."""
    chat: Chat
    reward: Reward
    moments: ScoreMoments
    """Moments of all scores so far."""
    critic: object | None

    def prompt_rows(self, split: Literal["train", "val"]) -> Sequence[Mapping[str, Any]]: ...


def ppo_view(pl_module: LightningModule) -> PPOView:
    """Return the module as the callbacks of PPO see it."""
    return cast(PPOView, pl_module)


def position(trainer: Trainer, pl_module: LightningModule) -> int:
    """Return the finished iterations; the optimizer steps of a module that does not count any.

    Under manual optimization Lightning's `global_step` counts every inner step of an iteration,
    and no update that was not made.
    """
    if hasattr(pl_module, "iteration"):
        return ppo_view(pl_module).iteration
    return trainer.global_step


def is_evaluation(trainer: Trainer) -> bool:
    """Return False in a sanity check over a part of the validation set only."""
    return not trainer.sanity_checking or trainer.num_sanity_val_steps == float("inf")
