"""Results of the steps of the modules, for callbacks to read.

Under manual optimization Lightning accepts only a dictionary from `training_step`: its one
entry, under `RESULT`, is the record. The other steps return the record itself.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from lightning_rlhf.core import records

RESULT = "result"
"""Key of the record that a training step returns."""


@dataclass(frozen=True, kw_only=True)
class IterationSeconds:
    """Seconds of each phase of an iteration of PPO; 0 where one was not run."""

    rollout: float
    """Seconds of sampling and annotating responses."""
    score: float
    """Seconds of scoring the responses by reward and reference."""
    update: float
    """Seconds of all optimizer steps."""
    other: float
    """Seconds from the end of the previous iteration to the start of this one."""


@dataclass(frozen=True, kw_only=True)
class IterationResult:
    """Result of `training_step` of PPO."""

    experience: records.Experience
    updates: tuple[records.UpdateStats, ...]
    """Statistics of each minibatch, in their order."""
    kl_coef: float
    """KL coefficient of the iteration."""
    padding: Float[Tensor, ""]
    """Share of the positions read for scoring that hold no token."""
    seconds: IterationSeconds
    group_size: int
    """Number of responses to one prompt that the advantage compares; 1 where it compares none."""

    @property
    def headline(self) -> dict[str, Float[Tensor, ""]]:
        """Return the four headline metrics by name; nan where no update was finite."""
        nothing = self.experience.score.new_full((1,), math.nan)
        flags = torch.stack([u.nonfinite for u in self.updates] or [*nothing]).tolist()
        finite = [u for u, nonfinite in zip(self.updates, flags, strict=False) if not nonfinite]
        return {
            "reward_mean": self.experience.score.mean(),
            "kl_divergence": self.experience.kl.sum(dim=1).mean(),
            "entropy": torch.stack([u.entropy for u in finite] or [*nothing]).mean(),
            "ppo_loss": torch.stack([u.loss for u in finite] or [*nothing]).mean(),
        }


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Result of `validation_step` of PPO: responses to held-out prompts."""

    rollout: records.Rollout
    decoded: records.DecodedResponses
    scores: records.Scores


@dataclass(frozen=True, kw_only=True)
class Step:
    """Facts of one update, common to the results of `training_step` of SFT, RM and DPO."""

    loss: Float[Tensor, ""]
    """Loss before the update: of SFT the cross-entropy, mean over the target tokens, nats; of a
    reward model the mean over the pairs; of DPO that of the pairs with the SFT term of the tokens.
    """
    grad_norm: Float[Tensor, ""]
    """Global norm of the gradient before clipping."""
    is_made: bool
    """False where the update was not made, because it is not finite."""


@dataclass(frozen=True, kw_only=True)
class SFTStep(Step):
    """Result of `training_step` of supervised fine-tuning."""

    tokens: Float[Tensor, ""]
    """Number of target tokens."""

    @property
    def headline(self) -> dict[str, Float[Tensor, ""]]:
        """Return the headline metric of the step by name."""
        return {"update/loss": self.loss}


@dataclass(frozen=True, kw_only=True)
class SFTEvaluation:
    """Result of `validation_step` of supervised fine-tuning."""

    nll_sum: Float[Tensor, ""]
    """Negative log-likelihood of the target tokens, summed, nats."""
    tokens: Float[Tensor, ""]
    """Number of target tokens."""


@dataclass(frozen=True, kw_only=True)
class PairScores(records.Record):
    """Scores of the two responses of each pair; result of `validation_step` of a reward model."""

    chosen: Float[Tensor, " B"]
    """Score of the preferred response, mean over the heads."""
    rejected: Float[Tensor, " B"]
    """Score of the other response, mean over the heads."""

    @property
    def losses(self) -> Float[Tensor, " B"]:
        """Return -log sigmoid(chosen - rejected) of each pair, in fp32."""
        return softplus(self.rejected.float() - self.chosen.float())

    @property
    def ranked_right(self) -> Float[Tensor, " B"]:
        """Return 1 where chosen > rejected, 1/2 at a tie, else 0."""
        return (self.chosen > self.rejected).float() + 0.5 * (self.chosen == self.rejected).float()


@dataclass(frozen=True, kw_only=True)
class PairStep(Step, PairScores):
    """Result of `training_step` on pairs; the scores are from before the update."""

    loss_name: ClassVar[str]
    """Name of the metric that is the mean of `losses`."""

    @property
    def headline(self) -> dict[str, Float[Tensor, ""]]:
        """Return the headline metrics of the step by name, means over its pairs."""
        return {self.loss_name: self.losses.mean(), "update/accuracy": self.ranked_right.mean()}


@dataclass(frozen=True, kw_only=True)
class RewardStep(PairStep):
    """Result of `training_step` of a reward model."""

    loss_name = "update/rm_loss"


@dataclass(frozen=True, kw_only=True)
class DPOScores(PairScores):
    """Result of `validation_step` of direct preference optimization.

    The score of a response is its implicit reward, beta * log(pi / pi_ref): of the sum over its
    tokens, or of their mean where the loss is length-normalized.
    """

    pair_losses: Float[Tensor, " B"]
    """Preference loss of each pair, with label smoothing and without the SFT term."""
    chosen_logprob: Float[Tensor, " B"]
    """Log-probability of the preferred response under the policy, sum over its tokens, nats."""
    rejected_logprob: Float[Tensor, " B"]
    """Log-probability of the other response, likewise."""
    chosen_tokens: Int[Tensor, " B"]
    """Number of tokens of the preferred response."""

    @property
    def losses(self) -> Float[Tensor, " B"]:
        """Return the preference loss of each pair."""
        return self.pair_losses


@dataclass(frozen=True, kw_only=True)
class DPOStep(PairStep, DPOScores):
    """Result of `training_step` of direct preference optimization."""

    loss_name = "update/dpo_loss"
