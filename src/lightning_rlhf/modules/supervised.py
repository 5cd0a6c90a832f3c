"""Modules that learn from given texts: SFT, the reward model and DPO; and SFT as a term of PPO."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rlhf.core import errors, masking, ppo_config, records, results
from lightning_rlhf.core.config import DPOConfig, RMConfig, SFTConfig, SupervisedConfig
from lightning_rlhf.core.logprobs import token_logprobs
from lightning_rlhf.core.losses import bradley_terry_loss, centering_loss, kto_loss, preference_loss
from lightning_rlhf.data.batches import Schedule, collate_demonstrations, digest_examples
from lightning_rlhf.data.lengths import DemonstrationTokens
from lightning_rlhf.models.config import POLICY, REFERENCE, REWARD
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules import optim
from lightning_rlhf.parallel.replicas import ONE, Replicas
from lightning_rlhf.parallel.sharding import clear


class SupervisedModule(optim.StageModule):
    """Base class of SFT, the reward model and DPO, which differ in `loss_share` and `scores`."""

    def __init__(
        self,
        stage: str,
        role: str,
        roles: Roles,
        config: SupervisedConfig,
        replicas: Replicas = ONE,
    ) -> None:
        """Make the module before its first step. stage: key of its section; role: one trained."""
        super().__init__(stage, config, replicas)
        self.role = role
        self.roles = roles

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, results.Step]:
        """Make one optimizer step on a batch, unless its loss or gradient is not finite."""
        share, parts = self.microbatch.fitting(lambda rows: self.accumulate(batch, rows))
        shares, grad_norm = self.sum_and_clip(share[None])
        loss = shares.sum()
        scores = self.joined(parts, batch, loss)
        is_made = self.check_finite(loss, grad_norm)
        if is_made:
            self.optimizers().step()  # type: ignore[union-attr]
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        self.iteration += 1
        step = results.Step(loss=loss, grad_norm=grad_norm, is_made=is_made, scores=scores)
        self.log_headline(step.headline)
        return {results.RESULT: step}

    def accumulate(self, batch: Any, size: int) -> tuple[Tensor, list[Any]]:
        """Backpropagate this process's rows of a batch, `size` at a time.

        Returns: their share of its loss, 0-d, and the scores of each micro-batch.
        """
        clear(self.optimizers())
        loss, parts, total = torch.zeros((), device=self.device), [], self.total(batch)
        for micro_batch in batch.select(self.replicas.rows).split(size):
            share, scores = self.loss_share(micro_batch, total)
            loss += self.add_gradient(share)
            parts.append(scores)
        return loss, parts

    def total(self, batch: Any) -> Any:
        """Return the denominator of the loss of a batch; without a choice its number of rows."""
        return len(batch)

    def loss_share(self, micro_batch: Any, total: Any) -> tuple[Tensor, Any]:
        """Return the share of a micro-batch in the loss of its batch, 0-d, and its scores.

        total: as `total` returns it.
        """
        raise NotImplementedError

    def scores(self, micro_batch: Any) -> Any:
        """Return what is measured of each row of a micro-batch, or of all its tokens in SFT."""
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the scores of a batch."""
        rows = batch.select(self.replicas.rows)
        parts = self.microbatch.fitting(lambda n: [*map(self.scores, rows.split(n))])
        scores, total = self.joined(parts, batch), self.total(batch)
        count = int(total[0] if isinstance(total, tuple) else total)
        self.log_headline(results.headline(scores, "eval"), count)
        return scores

    @torch.no_grad()
    def row_losses(self, batch: records.Record) -> Float[Tensor, " B"]:
        """Return the loss of each row of a batch by itself, without a gradient."""
        rows = batch.split(1)
        return torch.stack([self.loss_share(row, self.total(row))[0] for row in rows])

    def joined(self, parts: Sequence[Any], batch: Any, loss: Tensor | None = None) -> Any:
        """Return the scores of a batch from those of each process's rows.

        parts: scores of its micro-batches. loss: that of the batch in training, 0-d; SFT reads it.
        """
        rows = self.replicas.share(torch.arange(len(batch), device=self.device))
        return self.replicas.joined(rows, lambda _: type(parts[0]).joined(parts))

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        return self.build_optimizer([(1.0, self.roles.parameters())], steps)


def target_logprobs(
    roles: Roles, tokens: Int[Tensor, "B S"], target_mask: Bool[Tensor, "B S"]
) -> Float[Tensor, " N"]:
    """Return the log-probability of each target token under the active role, row after row, nats.

    target_mask: True on the tokens to be predicted, none of which is the first of its row. Where it
        is on the CPU, the device of the tokens is not waited for.
    """
    mask = target_mask[:, 1:]
    hidden = roles.hidden_at(tokens[:, :-1], mask)
    logprobs, _ = token_logprobs(
        hidden, masking.picker(mask)(tokens[:, 1:]), roles.head,
        temperature=1.0, vocab_size=roles.vocab_size, frozen_head=not roles.head_is_trained,
        row_multiple=roles.row_multiple,
    )  # fmt: skip
    return logprobs


class SFTModule(SupervisedModule):
    """Cross-entropy on the tokens of the response and its end token, mean over the batch's tokens.

    Source: Ouyang et al. 2022, section 3.5, https://arxiv.org/abs/2203.02155
    """

    config: SFTConfig

    def __init__(self, roles: Roles, config: SFTConfig, replicas: Replicas = ONE) -> None:
        super().__init__("sft", roles.role, roles, config, replicas)

    def total(self, batch: records.Demonstrations) -> Tensor:
        return masking.upload(batch.target_mask.sum(), self.device)

    def loss_share(self, micro_batch: records.Demonstrations, total: Tensor) -> tuple[Tensor, None]:
        return self.scores(micro_batch) / total, None

    def scores(self, micro_batch: records.Demonstrations) -> Tensor:
        """Return the negative log-likelihood of the target tokens, summed, nats; 0-d."""
        return -target_logprobs(self.roles, micro_batch.tokens, micro_batch.target_mask).sum()

    def joined(
        self, parts: Sequence[Any], batch: records.Demonstrations, loss: Tensor | None = None
    ) -> results.SFTScores:
        tokens = self.total(batch)
        if loss is not None:
            return results.SFTScores(nll_sum=loss.float() * tokens, tokens=tokens)
        sums = torch.stack([*parts] or [torch.zeros((), device=self.device)])
        return results.SFTScores(nll_sum=self.replicas.sum(sums.sum()), tokens=tokens)


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

    The reference is the same base with the policy's adapter switched off, or a frozen base. Where
    the loss reads none, log-probabilities take the place of log-ratios.
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
        loss = scores.losses.sum() / pairs + self.config.sft_coef * nll
        return loss, scores.detach()

    def scores(self, micro_batch: records.Preferences) -> results.DPOScores:
        """Return log-probabilities, implicit rewards and losses of the pairs."""
        config, (tokens, _) = self.config, micro_batch.stacked()
        logprobs, ratios, counts = self.log_ratios(tokens, target_mask(micro_batch))
        chosen, rejected = ratios.chunk(2)
        chosen_logprob, rejected_logprob = logprobs.chunk(2)
        return results.DPOScores(
            chosen=(config.beta * chosen).detach(),
            rejected=(config.beta * rejected).detach(),
            pair_losses=preference_loss(chosen, rejected, config),
            chosen_logprob=chosen_logprob,
            rejected_logprob=rejected_logprob,
            chosen_tokens=counts[: len(micro_batch)],
        )

    def log_ratios(
        self, tokens: Int[Tensor, "B S"], targets: Bool[Tensor, "B S"]
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"], Int[Tensor, " B"]]:
        """Return what a loss reads of each row's target tokens.

        Returns: their log-probability under the policy, summed, nats; its difference to that under
            the reference, where there is one, summed or mean as the loss wants; their number.
        """
        if self.config.has_reference:
            with torch.no_grad():
                reference = self.logprobs(REFERENCE, tokens, targets)
        else:
            reference = torch.zeros(len(tokens), device=tokens.device)
        logprobs = self.logprobs(POLICY, tokens, targets)
        counts = masking.upload(targets.sum(dim=1), tokens.device)
        ratios = logprobs - reference
        return logprobs, ratios if self.config.sums else ratios / counts, counts

    def logprobs(
        self, role: str, tokens: Int[Tensor, "B S"], targets: Bool[Tensor, "B S"]
    ) -> Float[Tensor, " B"]:
        """Return the log-probability of each row's target tokens under a role, summed, nats."""
        roles = self.roles.reference if role == REFERENCE else self.roles
        with roles.use_role(role):
            found = target_logprobs(roles, tokens, targets)
        mask = masking.upload(targets[:, 1:], found.device)
        return found.new_zeros(mask.shape).masked_scatter(mask, found).sum(dim=1)


class KTOModule(DPOModule):
    """Loss of single responses that are labelled good or bad, plus an SFT term on the good ones.

        mean over responses of `kto_loss` - sft_coef * mean over tokens of log pi(good token)

    The KL of a batch is estimated on its prompts with each other's responses, by the policy as it
    is, without a gradient: kl = max(0, mean over rows of log pi(y' | x) - log pi_ref(y' | x)).
    Source: Ethayarajh et al. 2024, section 4, https://arxiv.org/abs/2402.01306
    Departs: y' is the response half a batch further instead of the next one, which may be another
    one to the same prompt.
    """

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, results.Step]:
        return super().training_step(self.with_kl(batch), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return super().validation_step(self.with_kl(batch), batch_idx)

    @torch.no_grad()
    def with_kl(self, batch: records.Labels) -> records.Labels:
        """Return the batch with the KL that all of its rows, in all processes, estimate."""
        rows = batch.select(self.replicas.rows)

        def summed(size: int) -> Tensor:
            total = torch.zeros((), device=self.device)
            for part in rows.split(size):
                total += self.log_ratios(part.other_tokens, part.other_target_mask)[1].sum()
            return total

        total = self.replicas.sum(self.microbatch.fitting(summed))
        return replace(batch, kl=(total / len(batch)).clamp(min=0).repeat(len(batch)))

    def total(self, batch: records.Labels) -> tuple[int, Tensor]:  # type: ignore[override]
        """Return the numbers of responses and of tokens of good ones, which is at least 1."""
        tokens = batch.target_mask[batch.label].sum().clamp(min=1)
        return len(batch), masking.upload(tokens, self.device)

    def scores(self, micro_batch: records.Labels) -> results.LabelScores:  # type: ignore[override]
        """Return log-probabilities, implicit rewards and losses of the responses."""
        batch, beta = micro_batch, self.config.beta
        logprobs, ratios, counts = self.log_ratios(batch.tokens, batch.target_mask)
        kl = torch.zeros_like(ratios) if batch.kl is None else batch.kl
        label = masking.upload(batch.label, ratios.device)
        return results.LabelScores(
            reward=(beta * ratios).detach(),
            reference=beta * kl,
            label=label,
            losses=kto_loss(ratios, label, kl, self.config),
            logprob=logprobs,
            tokens=counts,
        )


def target_mask(batch: records.Preferences) -> Bool[Tensor, "2B W"]:
    """Return a mask of the response tokens of both sides, as `Preferences.stacked` orders them."""
    _, mask = batch.stacked()
    positions = torch.arange(mask.shape[1], device=mask.device)
    return mask & (positions >= batch.prompt_tokens.repeat(2)[:, None])


class PTX:
    """Term of the loss of stage=sft, on demonstrations, in the loss of each update of PPO.

        loss = PPO's loss + ptx_coef * ptx_loss
        ptx_loss = 1/N sum_i sum_t -log pi(y_it | x_i, y_i<t)

    The sums are over the demonstrations of a batch and their N target tokens, at temperature 1. The
    batch of update m in iteration k is number k * M + m of a `Schedule`, where M is the number of
    updates in an iteration: a function of (seed, k, m), in which all demonstrations come once
    before one comes again. Updates that ppo.target_kl leaves out leave out their batches.
    Source: Ouyang et al. 2022, eq. 2, https://arxiv.org/abs/2203.02155
    Departs: the texts are the demonstrations of SFT instead of those of pretraining, and the mean
    is over tokens.
    """

    def __init__(
        self,
        examples: Sequence[DemonstrationTokens],
        config: ppo_config.PPOConfig,
        *,
        pad_id: int,
        seed: int,
    ) -> None:
        """Set up the batches; pad_id: id of the padding token; seed: seed of their order."""
        self.examples = examples
        self.coef = config.ptx_coef
        # Where ppo.target_kl ends no iteration early.
        self.updates = config.ppo_epochs * (config.rollout_batch_size // config.minibatch_size)
        self.pad_id = pad_id
        lengths = [example.length for example in examples]
        size, batches = config.ptx_batch_size, config.iterations * self.updates
        self.schedule = Schedule(
            lengths=lengths, batch_size=size, batches=batches, seed=seed, pool_batches=1
        )

    def batch(self, iteration: int, update: int) -> records.Demonstrations:
        """Return the demonstrations of an update; both numbers count from 0."""
        rows = self.schedule.batch(iteration * self.updates + update)
        return collate_demonstrations([self.examples[row] for row in rows], self.pad_id)

    def backpropagate(
        self, module: Any, batch: records.Demonstrations, rows: int
    ) -> Float[Tensor, ""]:
        """Add the gradient of ptx_coef * ptx_loss of this process's rows; return their share of it.

        The role that is active is read. rows: number of demonstrations in a forward and backward
        pass.
        """
        batch = batch.to(module.device)
        tokens = masking.upload(batch.target_mask.sum(), module.device)
        loss = torch.zeros((), device=module.device)
        for part in batch.select(module.replicas.rows).split(rows):
            share = -target_logprobs(module.roles, part.tokens, part.target_mask).sum() / tokens
            module.add_gradient(self.coef * share)
            loss = loss + share.detach()
        return loss

    @cached_property
    def digest(self) -> str:
        """Return a digest of the demonstrations in their order."""
        return digest_examples(self.examples)

    def check(self, checkpoint: Mapping[str, Any]) -> None:
        """Raise CheckpointError where a checkpoint was trained on other demonstrations."""
        if "ptx" in checkpoint and checkpoint["ptx"] != self.digest:
            raise errors.CheckpointError(
                "the demonstrations of ppo.ptx_coef are others now, or in another order (digest "
                f"{self.digest}, was {checkpoint['ptx']})"
            )
