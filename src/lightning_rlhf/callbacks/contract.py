"""Protocols of the module attributes that callbacks read, and the x-axis of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast

from lightning.pytorch import LightningModule, Trainer

from lightning_rlhf.core.shaping import ScoreMoments, Term
from lightning_rlhf.core.types import Experience


class Chat(Protocol):
    """A decoder of responses."""

    def decode_response(self, tokens: list[int]) -> str: ...

    def show(self, tokens: Sequence[int]) -> str: ...


class Reward(Protocol):
    """The reward that the policy is trained on."""

    @property
    def terms(self) -> Sequence[Term]: ...


class PPOView(Protocol):
    """The attributes of a PPO module that callbacks read."""

    iteration: int
    """Number of finished iterations, over all resumes."""
    experience: Experience | None
    """Experience of the current iteration, or of the latest one between iterations."""
    chat: Chat
    """Decoder of responses."""
    reward: Reward
    """Reward that the policy is trained on."""
    moments: ScoreMoments
    """Running moments of all scores so far."""
    logs_headline: bool
    """False where a callback logs the headline metrics, so that the module does not."""
    critic: object | None
    """Value function; None without a critic."""

    def prompt_rows(self, split: Literal["train", "val"]) -> Sequence[Mapping[str, Any]]: ...


def ppo_view(pl_module: LightningModule) -> PPOView:
    """Return the module, typed as PPOView."""
    return cast(PPOView, pl_module)


def position(trainer: Trainer, pl_module: LightningModule) -> int:
    """Return the number of finished iterations, or of optimizer steps for a module without any.

    Under manual optimization Lightning's `global_step` counts every optimizer step within an
    iteration, and does not count skipped updates.
    """
    if hasattr(pl_module, "iteration"):
        return ppo_view(pl_module).iteration
    return trainer.global_step


def is_evaluation(trainer: Trainer) -> bool:
    """Return False in a sanity check over a part of the validation set, else True."""
    return not trainer.sanity_checking or trainer.num_sanity_val_steps == float("inf")
