"""Direct preference optimization: learn a policy from pairs, without a reward model."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rlhf.core.config import DPOConfig
from lightning_rlhf.core.losses import preference_loss
from lightning_rlhf.core.records import Preferences
from lightning_rlhf.core.results import DPOScores, DPOStep
from lightning_rlhf.models.config import POLICY, REFERENCE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.supervised import SupervisedModule, target_logprobs
from lightning_rlhf.parallel.replicas import ONE, Replicas


class DPOModule(SupervisedModule):
    """Preference loss on the log-ratios of policy to reference, plus an SFT term.

        mean over pairs of `preference_loss` - sft_coef * mean over tokens of log pi(chosen token)

    The reference is the same base with the policy's adapter switched off. It reads each
    micro-batch without a gradient before the policy does, so that its activations are not kept.
    Source: Rafailov et al. 2023, section 4, https://arxiv.org/abs/2305.18290; the SFT term, Pang et
    al. 2024, eq. 1, https://arxiv.org/abs/2404.19733
    Departs: the SFT term of Pang et al. is a mean over the tokens of each response by itself; here
    it is one over those of the batch, as the loss of stage=sft.
    """

    config: DPOConfig
    step_type = DPOStep

    def __init__(self, roles: Roles, config: DPOConfig, replicas: Replicas = ONE) -> None:
        super().__init__("dpo", POLICY, roles, config, replicas)

    def total(self, batch: Preferences) -> tuple[int, Tensor]:
        """Return the numbers of pairs and of tokens of chosen responses."""
        return len(batch), (batch.chosen_mask.sum(dim=1) - batch.prompt_tokens).sum()

    def columns(self, batch: Preferences) -> Sequence[Tensor]:
        local = batch.select(self.replicas.rows)
        return (target_mask(local).cpu().unflatten(0, (2, len(local))).transpose(0, 1),)

    def loss_share(
        self, micro_batch: Preferences, total: tuple[int, Tensor], *known: Bool[Tensor, "B 2 W"]
    ) -> tuple[Tensor, DPOScores]:
        pairs, tokens = total
        scores = self.scores(micro_batch, *(mask.transpose(0, 1).flatten(0, 1) for mask in known))
        nll = -scores.chosen_logprob.sum() / tokens
        loss = scores.pair_losses.sum() / pairs + self.config.sft_coef * nll
        return loss, scores.detach()

    def scores(
        self, micro_batch: Preferences, known: Bool[Tensor, "2B W"] | None = None
    ) -> DPOScores:
        """Return log-probabilities, implicit rewards and losses of the pairs.

        known: their `target_mask` on the CPU, where it is known.
        """
        config, (tokens, _) = self.config, micro_batch.stacked()
        targets = target_mask(micro_batch)
        known = targets if known is None else known
        if config.reference_free:
            reference = torch.zeros(len(tokens), device=tokens.device)
        else:
            with torch.no_grad():
                reference = self.logprobs(REFERENCE, tokens, targets, known)
        logprobs = self.logprobs(POLICY, tokens, targets, known)
        counts = targets.sum(dim=1)
        ratios = logprobs - reference
        chosen, rejected = (ratios / counts if config.is_length_normalized else ratios).chunk(2)
        chosen_logprob, rejected_logprob = logprobs.chunk(2)
        return DPOScores(
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
        self,
        role: str,
        tokens: Int[Tensor, "B S"],
        targets: Bool[Tensor, "B S"],
        known: Bool[Tensor, "B S"],
    ) -> Float[Tensor, " B"]:
        """Return the log-probability of each row's target tokens under a role, summed, nats.

        known: `targets`, on the CPU where they are known there.
        """
        with self.roles.use_role(role):
            found = target_logprobs(self.roles, tokens, known)
        return found.new_zeros(targets[:, 1:].shape).masked_scatter(targets[:, 1:], found).sum(1)


def target_mask(batch: Preferences) -> Bool[Tensor, "2B W"]:
    """Return a mask of the response tokens of both sides, as `Preferences.stacked` orders them."""
    _, mask = batch.stacked()
    positions = torch.arange(mask.shape[1], device=mask.device)
    return mask & (positions >= batch.prompt_tokens.repeat(2)[:, None])
