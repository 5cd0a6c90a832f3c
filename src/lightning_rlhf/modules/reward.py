"""Reward modelling: learn a score from pairs of which people preferred one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from lightning_rlhf.core.config import RMConfig
from lightning_rlhf.core.losses import bradley_terry_loss, centering_loss
from lightning_rlhf.core.types import Preferences
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.learner import Learner, by_row
from lightning_rlhf.modules.optim import (
    advance_schedule,
    build_optimizer,
    check_parameters,
    trainable_state,
)


class RewardModule(L.LightningModule):
    """Bradley-Terry on preference pairs and a pull of their rewards to 0, mean over the pairs.

    The heads of an ensemble each learn from pairs drawn with replacement, so that they differ
    where the pairs decide little.
    Source: Ouyang et al. 2022, eq. 1, https://arxiv.org/abs/2203.02155; drawing pairs as they
    come, Oza and Russell 2001, https://proceedings.mlr.press/r3/oza01a.html
    """

    def __init__(self, roles: Roles, config: RMConfig, *, seed: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        self.roles = roles
        self.config = config
        self.seed = seed
        self.learner = Learner("rm", config)
        self.iteration = 0
        """Finished batches, over all resumes; an update that was not made counts too."""

    def training_step(self, batch: Preferences, batch_idx: int) -> dict[str, Any]:
        rewards: list[dict[str, Tensor]] = []
        draws = self.draws(len(batch))

        def losses(size: int) -> Iterator[Tensor]:
            rewards.clear()
            for part, drawn in zip(batch.split(size), draws.split(size), strict=True):
                yield self.loss_sum(part, drawn, rewards) / len(batch)

        loss, grad_norm = self.learner.gradient(self, losses)
        is_made = self.learner.step(self, loss, grad_norm)
        advance_schedule(self)
        self.iteration += 1
        sides = {side: torch.cat([r[side] for r in rewards]) for side in ("chosen", "rejected")}
        return {"loss": loss, "grad_norm": grad_norm, "is_made": is_made, **sides}

    def validation_step(self, batch: Preferences, batch_idx: int) -> dict[str, Tensor]:
        parts = self.learner.microbatch.fitting(
            lambda size: [self.rewards(part) for part in batch.split(size)]
        )
        return {side: torch.cat([p[side] for p in parts]).mean(dim=1) for side in parts[0]}

    def predict_step(self, batch: Preferences, batch_idx: int) -> dict[str, Tensor]:
        """What the model as it is now says of each pair by itself, as `by_row`.

        Returns: the pairs' loss and grad_norm; the scores of the chosen and the rejected responses,
            chosen_score and rejected_score, mean over the heads. All [B].
        """
        draws = iter(self.draws(len(batch)).split(1))

        def facts(pair: Preferences) -> dict[str, Tensor]:
            rewards: list[dict[str, Tensor]] = []
            loss = self.loss_sum(pair, next(draws), rewards)
            return {"loss": loss} | {f"{side}_score": x for side, x in rewards[0].items()}

        return by_row(self, batch, facts)

    def draws(self, pairs: int) -> Float[Tensor, "B H"]:
        """How often each head draws each pair: from Poisson(1); once where there is one head."""
        rates = torch.ones(pairs, self.config.heads)
        if self.config.heads > 1:
            sequence = np.random.SeedSequence((self.seed, self.iteration))
            generator = torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))
            rates = torch.poisson(rates, generator)
        return rates.to(self.device)

    def loss_sum(
        self, batch: Preferences, draws: Float[Tensor, "B H"], rewards: list[dict[str, Tensor]]
    ) -> Tensor:
        """Loss summed over the pairs, 0-d; what the two sides got is appended to `rewards`."""
        config, sides = self.config, self.rewards(batch)
        rewards.append({name: reward.detach().mean(dim=1) for name, reward in sides.items()})
        chosen, rejected = sides["chosen"], sides["rejected"]
        losses = bradley_terry_loss(
            chosen,
            rejected,
            margin=config.margin_coef * batch.margin[:, None],
            label_smoothing=config.label_smoothing,
        )
        losses = losses + config.center_coef * centering_loss(chosen, rejected)
        return (draws * losses).mean(dim=1).sum()

    def rewards(self, batch: Preferences) -> dict[str, Float[Tensor, "B H"]]:
        """What each head says of the chosen and of the rejected responses, in one forward pass."""
        width = max(batch.chosen.shape[1], batch.rejected.shape[1])
        sides = (batch.chosen, batch.chosen_mask), (batch.rejected, batch.rejected_mask)
        tokens, mask = (
            torch.cat([F.pad(side[i], (0, width - side[i].shape[1])) for side in sides])
            for i in range(2)
        )
        chosen, rejected = self.roles.rewards(tokens, mask).chunk(2)
        return {"chosen": chosen, "rejected": rejected}

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        return build_optimizer([(1.0, self.roles.parameters())], self.config, steps)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return trainable_state(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["iteration"] = self.iteration
        checkpoint["learner"] = self.learner.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_parameters(self, checkpoint)
        self.iteration = checkpoint["iteration"]
        self.learner.load_state_dict(checkpoint["learner"])
