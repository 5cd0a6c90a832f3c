"""Modules that learn from pairs of a preferred and another response: the reward model, and DPO."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rlhf.core import masking, records, results
from lightning_rlhf.core.config import DPOConfig, RMConfig
from lightning_rlhf.core.losses import bradley_terry_loss, centering_loss, preference_loss
from lightning_rlhf.models.config import POLICY, REFERENCE, REWARD
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules import optim
from lightning_rlhf.modules.supervised import SupervisedModule, target_logprobs
from lightning_rlhf.parallel.replicas import ONE, Replicas


class RewardModule(SupervisedModule):
    """Bradley-Terry loss on preference pairs plus a centering loss, mean over the pairs.

    The heads of an ensemble each learn from pairs drawn with replacement, so that they disagree
    where the pairs carry little information.
    Source: Ouyang et al. 2022, eq. 1, https://arxiv.org/abs/2203.02155; drawing pairs as they
    come, Oza and Russell 2001, https://proceedings.mlr.press/r3/oza01a.html
    """

    config: RMConfig

    def __init__(
        self, roles: Roles, config: RMConfig, *, seed: int, replicas: Replicas = ONE
    ) -> None:
        super().__init__("rm", REWARD, roles, config, replicas)
        self.seed = seed

    def accumulate(self, batch: records.Preferences, size: int) -> tuple[Tensor, list[Any]]:
        return super().accumulate(replace(batch, draws=self.draws(len(batch))), size)

    def loss_share(
        self, micro_batch: records.Preferences, total: int
    ) -> tuple[Tensor, results.PairScores]:
        config, rewards = self.config, self.roles.rewards(*micro_batch.stacked()).chunk(2)
        margin = config.margin_coef * micro_batch.margin[:, None]
        losses = bradley_terry_loss(*rewards, margin=margin, label_smoothing=config.label_smoothing)
        losses = losses + config.center_coef * centering_loss(*rewards)
        if micro_batch.draws is not None:
            losses = micro_batch.draws * losses
        return losses.mean(dim=1).sum() / total, pair_scores(rewards)

    def draws(self, pairs: int) -> Float[Tensor, "B H"]:
        """Return how often each head draws each pair: by Poisson(1); once with a single head."""
        rates = torch.ones(pairs, self.config.heads)
        if self.config.heads > 1:
            rates = torch.poisson(rates, optim.seeded(self.seed, self.iteration))
        return masking.upload(rates, self.device)

    def scores(self, micro_batch: records.Preferences) -> results.PairScores:
        """Return the scores of both sides: means over the heads, without a gradient."""
        return pair_scores(self.roles.rewards(*micro_batch.stacked()).chunk(2))


def pair_scores(rewards: Sequence[Float[Tensor, "B H"]]) -> results.PairScores:
    """Return the scores of the chosen and the rejected responses: means over heads, detached."""
    chosen, rejected = (side.detach().mean(dim=1) for side in rewards)
    return results.PairScores(chosen=chosen, rejected=rejected)


class DPOModule(SupervisedModule):
    """Preference loss on the log-ratios of policy to reference, plus an SFT term.

        mean over pairs of `preference_loss` - sft_coef * mean over tokens of log pi(chosen token)

    The reference is the same base with the policy's adapter switched off.
    Source: Rafailov et al. 2023, section 4, https://arxiv.org/abs/2305.18290; the SFT term, Pang et
    al. 2024, eq. 1, https://arxiv.org/abs/2404.19733
    Departs: the SFT term of Pang et al. is a mean over the tokens of each response by itself; here
    it is one over those of the batch, as the loss of stage=sft.
    """

    config: DPOConfig

    def __init__(self, roles: Roles, config: DPOConfig, replicas: Replicas = ONE) -> None:
        super().__init__("dpo", POLICY, roles, config, replicas)

    def total(self, batch: records.Preferences) -> tuple[int, Tensor]:
        """Return the numbers of pairs and of tokens of chosen responses."""
        tokens = (batch.chosen_mask.sum(dim=1) - batch.prompt_tokens).sum()
        return len(batch), masking.upload(tokens, self.device)

    def loss_share(
        self, micro_batch: records.Preferences, total: tuple[int, Tensor]
    ) -> tuple[Tensor, results.DPOScores]:
        (pairs, tokens), scores = total, self.scores(micro_batch)
        nll = -scores.chosen_logprob.sum() / tokens
        loss = scores.pair_losses.sum() / pairs + self.config.sft_coef * nll
        return loss, scores.detach()

    def scores(self, micro_batch: records.Preferences) -> results.DPOScores:
        """Return log-probabilities, implicit rewards and losses of the pairs."""
        config, (tokens, _) = self.config, micro_batch.stacked()
        targets = target_mask(micro_batch)
        if config.reference_free:
            reference = torch.zeros(len(tokens), device=tokens.device)
        else:
            with torch.no_grad():
                reference = self.logprobs(REFERENCE, tokens, targets)
        logprobs = self.logprobs(POLICY, tokens, targets)
        counts = masking.upload(targets.sum(dim=1), tokens.device)
        ratios = logprobs - reference
        # Sums over the tokens of a response with loss_type=sigmoid, else means.
        summed = ratios if config.loss_type == "sigmoid" else ratios / counts
        chosen, rejected = summed.chunk(2)
        chosen_logprob, rejected_logprob = logprobs.chunk(2)
        return results.DPOScores(
            chosen=(config.beta * chosen).detach(),
            rejected=(config.beta * rejected).detach(),
            pair_losses=preference_loss(
                chosen, rejected, beta=config.beta, loss_type=config.loss_type,
                label_smoothing=config.label_smoothing,
            ),
            chosen_logprob=chosen_logprob,
            rejected_logprob=rejected_logprob,
            chosen_tokens=counts[: len(micro_batch)],
        )  # fmt: skip

    def logprobs(
        self, role: str, tokens: Int[Tensor, "B S"], targets: Bool[Tensor, "B S"]
    ) -> Float[Tensor, " B"]:
        """Return the log-probability of each row's target tokens under a role, summed, nats."""
        with self.roles.use_role(role):
            found = target_logprobs(self.roles, tokens, targets)
        mask = masking.upload(targets[:, 1:], found.device)
        return found.new_zeros(mask.shape).masked_scatter(mask, found).sum(dim=1)


def target_mask(batch: records.Preferences) -> Bool[Tensor, "2B W"]:
    """Return a mask of the response tokens of both sides, as `Preferences.stacked` orders them."""
    _, mask = batch.stacked()
    positions = torch.arange(mask.shape[1], device=mask.device)
    return mask & (positions >= batch.prompt_tokens.repeat(2)[:, None])
