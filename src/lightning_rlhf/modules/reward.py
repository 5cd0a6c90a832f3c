"""Reward modelling: learn a score from pairs of a preferred and another response."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_rlhf.core.config import RMConfig
from lightning_rlhf.core.losses import bradley_terry_loss, centering_loss
from lightning_rlhf.core.masking import upload
from lightning_rlhf.core.records import Preferences
from lightning_rlhf.core.results import PairScores, RewardStep
from lightning_rlhf.models.config import REWARD
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.optim import backward, halving_microbatches, zero_gradients
from lightning_rlhf.modules.supervised import SupervisedModule
from lightning_rlhf.parallel.replicas import ONE, Replicas


class RewardModule(SupervisedModule):
    """Bradley-Terry loss on preference pairs plus a centering loss, mean over the pairs.

    The heads of an ensemble each learn from pairs drawn with replacement, so that they disagree
    where the pairs carry little information.
    Source: Ouyang et al. 2022, eq. 1, https://arxiv.org/abs/2203.02155; drawing pairs as they
    come, Oza and Russell 2001, https://proceedings.mlr.press/r3/oza01a.html
    """

    config: RMConfig
    step_type = RewardStep

    def __init__(
        self, roles: Roles, config: RMConfig, *, seed: int, replicas: Replicas = ONE
    ) -> None:
        super().__init__("rm", REWARD, roles, config, replicas)
        self.seed = seed

    @halving_microbatches
    def accumulate(self, batch: Preferences) -> tuple[Tensor, list[PairScores]]:
        zero_gradients(self)
        size, rows = self.guard.microbatch.rows, self.replicas.rows
        mine, draws = batch.select(rows), self.draws(len(batch))[rows]
        loss, scores = torch.zeros((), device=self.device), []
        lengths = torch.stack([mine.chosen_mask.sum(1), mine.rejected_mask.sum(1)], dim=1).cpu()
        parts = (mine.split(size), draws.split(size), lengths.split(size))
        for micro_batch, drawn, length in zip(*parts, strict=False):
            rewards = self.rewards(micro_batch, length.T.flatten())
            loss += backward(self, self.loss_sum(micro_batch, rewards, drawn) / len(batch))
            scores.append(mean_scores(*rewards))
        return loss, scores

    def validation_step(self, batch: Preferences, batch_idx: int) -> PairScores:  # type: ignore[override]
        return self.joined(self.scores_of_share(batch), batch)

    @halving_microbatches
    def scores_of_share(self, batch: Preferences) -> list[PairScores]:
        """Return the scores of each micro-batch of this process's rows."""
        mine = batch.select(self.replicas.rows).split(self.guard.microbatch.rows)
        return [mean_scores(*self.rewards(micro_batch)) for micro_batch in mine]

    def row_loss(self, row: Preferences) -> Tensor:
        """Return the loss of a batch of one pair, 0-d, from which each head learns once."""
        rewards = self.rewards(row)
        return self.loss_sum(row, rewards, torch.ones_like(rewards[0]))

    def draws(self, pairs: int) -> Float[Tensor, "B H"]:
        """Return how often each head draws each pair: by Poisson(1); once with a single head."""
        rates = torch.ones(pairs, self.config.heads)
        if self.config.heads > 1:
            sequence = np.random.SeedSequence((self.seed, self.iteration))
            generator = torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))
            rates = torch.poisson(rates, generator)
        return upload(rates, self.device)

    def loss_sum(
        self,
        batch: Preferences,
        rewards: tuple[Float[Tensor, "B H"], Float[Tensor, "B H"]],
        draws: Float[Tensor, "B H"],
    ) -> Tensor:
        """Return the loss summed over the pairs, 0-d, from the result of `rewards`."""
        config = self.config
        losses = bradley_terry_loss(
            *rewards,
            margin=config.margin_coef * batch.margin[:, None],
            label_smoothing=config.label_smoothing,
        )
        losses = losses + config.center_coef * centering_loss(*rewards)
        return (draws * losses).mean(dim=1).sum()

    def rewards(
        self, batch: Preferences, lengths: Int[Tensor, " 2B"] | None = None
    ) -> tuple[Float[Tensor, "B H"], Float[Tensor, "B H"]]:
        """Return each head's rewards of the chosen and of the rejected responses, in one pass.

        lengths: number of tokens of each side, the chosen ones first, where the CPU knows them.
        """
        chosen, rejected = self.roles.rewards(*batch.stacked(), lengths=lengths).chunk(2)
        return chosen, rejected


def mean_scores(chosen: Float[Tensor, "B H"], rejected: Float[Tensor, "B H"]) -> PairScores:
    """Return the scores of pairs: means over the heads, without a gradient."""
    return PairScores(chosen=chosen.detach().mean(dim=1), rejected=rejected.detach().mean(dim=1))
