"""Results of the steps of the modules, for callbacks to read.

Under manual optimization Lightning accepts only a dictionary from `training_step`: its one
entry, under `RESULT`, is the record. The other steps return the record itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from lightning_rlhf.core import metrics, records

RESULT = "result"
"""Key of the record that a training step returns."""


@dataclass(frozen=True)
class IterationResult:
    """Result of `training_step` of PPO."""

    experience: records.Experience
    updates: tuple[records.UpdateStats, ...]
    """Statistics of each minibatch, in their order."""
    kl_coef: float
    """KL coefficient of the iteration."""
    ent_coef: float
    """Entropy coefficient of the iteration."""
    padding: Float[Tensor, ""]
    """Share of the positions read for scoring that hold no token."""
    seconds: Mapping[str, float]
    """Seconds of each phase: `rollout` samples and annotates, `score` reads reward and reference,
    `update` makes all optimizer steps, and `other` is what came since the previous iteration."""
    replaced: tuple[records.Rollout, ...] = ()
    """Responses that ppo.resample_groups replaced, round by round."""

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

    @property
    def headline(self) -> dict[str, Float[Tensor, ""]]:
        """Return the mean score, and the mean KL of a response to the reference, by name."""
        rollout = self.rollout
        log_ratio = rollout.logprobs - self.scores.ref_logprobs
        kl = torch.where(rollout.response_mask, log_ratio, 0.0).float().sum(dim=1)
        return {
            metrics.HELD_OUT: self.scores.score.float().mean(),
            metrics.HELD_OUT_KL: kl.mean(),
        }


@dataclass(frozen=True, kw_only=True)
class SFTScores:
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
    loss_name: ClassVar[str] = "rm_loss"
    """Name, without its phase, of the metric that is the mean of `losses`."""

    @property
    def losses(self) -> Float[Tensor, " B"]:
        """Return -log sigmoid(chosen - rejected) of each pair, in fp32."""
        return softplus(self.rejected.float() - self.chosen.float())

    @property
    def ranked_right(self) -> Float[Tensor, " B"]:
        """Return 1 where chosen > rejected, 1/2 at a tie, else 0."""
        return (self.chosen > self.rejected).float() + 0.5 * (self.chosen == self.rejected).float()


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
    loss_name = "dpo_loss"

    @property
    def losses(self) -> Float[Tensor, " B"]:
        """Return the preference loss of each pair."""
        return self.pair_losses


@dataclass(frozen=True, kw_only=True)
class LabelScores(records.Record):
    """Scores of responses with a label; result of `validation_step` of DPO with loss_type=kto."""

    reward: Float[Tensor, " B"]
    """Implicit reward of each response, as in `DPOScores`."""
    reference: Float[Tensor, " B"]
    """Reward that those of the batch are compared with: beta times the KL."""
    label: Bool[Tensor, " B"]
    """True where the response is good."""
    losses: Float[Tensor, " B"]
    """Loss of each response, without the SFT term."""
    logprob: Float[Tensor, " B"]
    """Log-probability of each response under the policy, sum over its tokens, nats."""
    tokens: Int[Tensor, " B"]
    """Number of tokens of each response."""
    loss_name: ClassVar[str] = DPOScores.loss_name

    @property
    def chosen_logprob(self) -> Float[Tensor, " B"]:
        """Return the log-probability of each good response; 0 of a bad one."""
        return torch.where(self.label, self.logprob, 0)

    @property
    def ranked_right(self) -> Float[Tensor, " B"]:
        """Return 1 where a reward is above the reference if good and below it if bad, 1/2 at a tie,
        else 0."""
        lead = torch.where(self.label, 1, -1) * (self.reward - self.reference)
        return (lead > 0).float() + 0.5 * (lead == 0).float()


@dataclass(frozen=True, kw_only=True)
class Step:
    """Result of `training_step` of SFT, a reward model and DPO."""

    loss: Float[Tensor, ""]
    """Loss before the update: of SFT the cross-entropy, mean over the target tokens, nats; of a
    reward model the mean over the pairs; of DPO that of the pairs, or labelled responses, with the
    SFT term of the tokens.
    """
    grad_norm: Float[Tensor, ""]
    """Global norm of the gradient before clipping."""
    is_made: bool
    """False where the update was not made, because it is not finite."""
    scores: SFTScores | PairScores | LabelScores
    """Scores of the batch before the update, as `validation_step` returns them."""

    @property
    def headline(self) -> dict[str, Float[Tensor, ""]]:
        """Return the headline metrics of the step by name; of pairs they are means."""
        if isinstance(self.scores, SFTScores):
            return {"update/loss": self.loss}
        return headline(self.scores, "update")


def headline(
    scores: SFTScores | PairScores | LabelScores, phase: str
) -> dict[str, Float[Tensor, ""]]:
    """Return the headline metrics of a batch by name: means over target tokens, pairs or rows."""
    if isinstance(scores, SFTScores):
        return {f"{phase}/loss": scores.nll_sum / scores.tokens}
    loss, right = scores.losses.mean(), scores.ranked_right.mean()
    return {f"{phase}/{scores.loss_name}": loss, f"{phase}/accuracy": right}
