"""Warnings of common failures of PPO during a run."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rlhf.callbacks.contract import ppo_view
from lightning_rlhf.callbacks.terminal import say
from lightning_rlhf.core.results import RESULT, IterationResult
from lightning_rlhf.core.shaping import paid_sum
from lightning_rlhf.core.types import Experience

CONSTANT_FOR = 3
"""Number of consecutive iterations with a constant reward after which a warning is printed."""


class Diagnosis(Callback):
    """Callback that warns of a constant reward and of a large KL to the reference, once per run.

    The reward is constant where all responses of an iteration have the same score, or the same
    training reward where components are normalised by running moments or clipped. Place it after
    PPOMetrics, which measures the KL, and before Checkpoints, so that a resumed run does not repeat
    a warning.
    """

    def __init__(self, kl_warning: float | None) -> None:
        """Set the threshold of the KL warning.

        kl_warning: KL to the reference, in nats per response; None disables the warning.
        """
        self.kl_warning = kl_warning
        self.constant = 0
        """Number of consecutive iterations with a constant reward, up to the latest one."""
        self.told: list[str] = []
        """Names of the warnings printed so far."""

    def state_dict(self) -> dict[str, Any]:
        return {"constant": self.constant, "told": list(self.told)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.constant, self.told = state_dict["constant"], list(state_dict["told"])

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        result: IterationResult = outputs[RESULT]
        experience = result.experience
        self.constant = self.constant + 1 if is_constant(experience, pl_module) else 0
        if self.constant >= CONSTANT_FOR:
            self.warn(
                "constant",
                f"all responses of an iteration got the same reward, {CONSTANT_FOR} iterations in "
                f"a row (the last time {experience.score[0].item():g}): there is nothing to learn "
                "from it. Look at the reward, and at samples/",
            )
        kl, iteration = (
            float(trainer.callback_metrics["kl_divergence"]),
            ppo_view(pl_module).iteration,
        )
        if self.kl_warning is not None and kl > self.kl_warning:
            self.warn(
                "kl",
                f"kl_divergence is {kl:.4g} nats a response in iteration {iteration}, above "
                f"ppo.kl_warning={self.kl_warning:g}: so far from the SFT model a reward says "
                "little. Look at samples/; a smaller ppo.lr, or a larger ppo.kl_coef, keeps the "
                "policy near",
            )

    def warn(self, name: str, text: str) -> None:
        """Print the warning, unless one of the same name was printed in this run."""
        if name not in self.told:
            self.told.append(name)
            say(f"warning: {text}", "yellow")


def is_constant(experience: Experience, pl_module: LightningModule) -> bool:
    """Return True if several responses all have the same score, or the same training reward."""
    module = ppo_view(pl_module)
    terms = module.reward.terms
    numbers = [experience.score]
    if not all(term.is_paid_as_reported for term in terms):
        numbers.append(paid_sum(experience.component_scores, terms, module.moments.components))
    # Compares values, since the standard deviation of equal values may be rounded above 0.
    return len(experience) > 1 and any(bool(torch.all(x == x[0])) for x in numbers)
