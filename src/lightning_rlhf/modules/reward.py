"""Reward modelling: learn a score from pairs of a preferred and another response."""

from collections.abc import Sequence

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

    def columns(self, batch: Preferences) -> Sequence[Tensor]:
        """Return how often each head draws each pair, and the numbers of tokens of both sides."""
        rows = self.replicas.rows
        draws, local = self.draws(len(batch))[rows], batch.select(rows)
        lengths = torch.stack([local.chosen_mask.sum(1), local.rejected_mask.sum(1)], dim=1)
        return draws, lengths.cpu()

    def loss_share(
        self, micro_batch: Preferences, total: int, *known: Tensor
    ) -> tuple[Tensor, PairScores]:
        """Return the share as the base class; each head learns from a pair once without draws."""
        config, lengths = self.config, known[1].T.flatten() if known else None
        rewards = self.rewards(micro_batch, lengths)
        losses = bradley_terry_loss(
            *rewards,
            margin=config.margin_coef * micro_batch.margin[:, None],
            label_smoothing=config.label_smoothing,
        )
        losses = losses + config.center_coef * centering_loss(*rewards)
        draws = known[0] if known else torch.ones_like(losses)
        return (draws * losses).mean(dim=1).sum() / total, mean_scores(*rewards)

    def draws(self, pairs: int) -> Float[Tensor, "B H"]:
        """Return how often each head draws each pair: by Poisson(1); once with a single head."""
        rates = torch.ones(pairs, self.config.heads)
        if self.config.heads > 1:
            sequence = np.random.SeedSequence((self.seed, self.iteration))
            generator = torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))
            rates = torch.poisson(rates, generator)
        return upload(rates, self.device)

    def scores(self, micro_batch: Preferences) -> PairScores:
        return mean_scores(*self.rewards(micro_batch))

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
