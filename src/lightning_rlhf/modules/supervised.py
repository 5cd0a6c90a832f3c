"""Base class of the modules that learn from given texts, SFT, and its loss as a term of PPO's."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rlhf.core import masking, records, results
from lightning_rlhf.core.config import PPOConfig, SFTConfig, SupervisedConfig
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.logprobs import token_logprobs
from lightning_rlhf.data.batches import Schedule, collate_demonstrations, digest_examples
from lightning_rlhf.data.lengths import DemonstrationTokens
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules import optim
from lightning_rlhf.parallel.replicas import ONE, Replicas


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
        self.optimizers().zero_grad()  # type: ignore[union-attr]
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
        return self.joined(parts, batch)

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
        self, examples: Sequence[DemonstrationTokens], config: PPOConfig, *, pad_id: int, seed: int
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
        pass. The share of each pass is divided by the target tokens of the whole batch, so that the
        shares add up.
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
            raise CheckpointError(
                "the demonstrations of ppo.ptx_coef are others now, or in another order (digest "
                f"{self.digest}, was {checkpoint['ptx']})"
            )
