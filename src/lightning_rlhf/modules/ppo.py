"""Proximal policy optimization from a reward model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import lightning as L
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_rlhf.core.device_memory import MicrobatchSize
from lightning_rlhf.core.errors import (
    LogitsError,
    NotFiniteError,
    PolicyLogitsError,
    RewardError,
    SamplingMemoryError,
    require,
)
from lightning_rlhf.core.experience import make_experience, minibatches, whitened
from lightning_rlhf.core.kl import next_kl_coef
from lightning_rlhf.core.losses import token_weights
from lightning_rlhf.core.masking import by_length
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.ppo_terms import PolicyOutputs, ppo_terms, sum_terms
from lightning_rlhf.core.results import (
    RESULT,
    EvaluationResult,
    IterationResult,
    IterationSeconds,
    PPOPredictions,
)
from lightning_rlhf.core.shaping import RunningMoments, ScoreMoments, rewards_overflow
from lightning_rlhf.core.types import (
    DecodedResponses,
    Experience,
    IterationBatch,
    PPOTerms,
    Prompts,
    Rollout,
    SampledResponses,
    Scores,
    UpdateStats,
)
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.models.roles import POLICY, REFERENCE, Roles
from lightning_rlhf.modules.optim import (
    advance_schedule,
    backward,
    build_optimizer,
    check_parameters,
    clip_gradients,
    step,
    trainable_state,
    zero_gradients,
)
from lightning_rlhf.modules.update_guard import UpdateGuard, halving_microbatches
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.annotate import annotate, predict
from lightning_rlhf.rollout.build_sampler import build_sampler
from lightning_rlhf.rollout.compute import RoleFlops, iteration_compute
from lightning_rlhf.rollout.critic import Critic
from lightning_rlhf.rollout.decoded import decode_responses
from lightning_rlhf.rollout.sampler import Sampler, SamplingParams
from lightning_rlhf.rollout.score import (
    padding_share,
    response_hidden,
    response_kl,
    response_logprobs,
    score,
)

TRAINING, EVALUATION = 0, 1  # numbers of the random-number streams


class PPOModule(L.LightningModule):
    """One batch of prompts is one iteration: sample, score, then several optimizer steps.

    Everything random in iteration k is drawn from a generator seeded with (seed, k), so that a
    run repeats exactly and a resumed one needs no random state.

    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593; Ouyang et al. 2022,
    https://arxiv.org/abs/2203.02155
    """

    def __init__(
        self,
        roles: Roles,
        reward: Reward,
        config: PPOConfig,
        *,
        critic: Critic | None,
        chat: ChatFormat,
        prompts: Mapping[str, Sequence[dict[str, Any]]],
        seed: int,
        microbatch: MicrobatchSize | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """Build the module before its first iteration.

        Args:
            critic: one for advantage=gae, None for the others.
            prompts: split ("train", "val") -> rows of the data.
            microbatch: size of the micro-batches, shared with the reward's model and halved for
                both at once; None makes one from ppo.microbatch_size.
            sampler: sampler of the responses; None builds the one that ppo.rollout names.
        """
        super().__init__()
        require((critic is not None) == config.has_critic, "the critic", critic,
                f"one for ppo.advantage=gae, else None; it is {config.advantage}")  # fmt: skip
        self.automatic_optimization = False
        self.strict_loading = False
        self.roles = roles
        self.reward = reward
        self.config = config
        self.critic = critic
        if critic is not None:
            self.critic_roles = critic.roles  # so that Lightning moves and saves it
        self.chat = chat
        params = SamplingParams(
            max_response_tokens=config.max_response_tokens,
            temperature=config.temperature,
            end_token_ids=chat.end_token_ids,
            stop=chat.stop_at(config.stop_strings),
        )
        self.sampler = sampler or build_sampler(config.rollout, roles, params, critic)
        self.prompts = prompts
        self.seed = seed
        self.guard = UpdateGuard("ppo", config, microbatch)
        self.iteration = 0
        """Number of finished iterations, over all resumes."""
        self.kl_coef = config.kl_coef
        """KL coefficient of the current iteration."""
        self.moments = ScoreMoments.none(len(reward.terms))
        """Moments of all scores so far."""
        self.logs_headline = True
        """False where a callback logs the headline metrics together with all others."""
        self.updated = time.perf_counter()
        """Time at which the last iteration ended."""
        self.batch: IterationBatch | None = None
        """Batch of the current or the latest iteration; None before the first."""
        roles.set_role(POLICY)

    def training_step(
        self, batch: Prompts | IterationBatch, batch_idx: int
    ) -> dict[str, IterationResult]:
        """Sample and score prompts, then learn; a recorded batch is learned from as it is."""
        other_s, rollout_s, score_s = time.perf_counter() - self.updated, 0.0, 0.0
        if isinstance(batch, IterationBatch):
            self.batch = batch
        else:
            self.batch, rollout_s, score_s = self.collect(batch)
        experience, kl_coef = self.batch.experience, self.batch.kl_coef
        started = time.perf_counter()
        updates = self.learn(self.batch)
        self.updated = time.perf_counter()
        advance_schedule(self)
        # After the update: an error during it leaves the state from before the iteration.
        self.moments = self.moments.including(experience)
        self.kl_coef = next_kl_coef(
            self.kl_coef, experience.kl, self.config, iteration=self.iteration
        )
        compute = iteration_compute(
            self.role_flops, self.reward, self.sampler, self.config, experience,
            updates=len(updates),
            microbatch_size=self.guard.microbatch.rows,
            policy_learns=self.iteration >= self.config.critic_warmup,
        )  # fmt: skip
        self.iteration += 1
        result = IterationResult(
            experience=experience,
            updates=updates,
            kl_coef=kl_coef,
            padding=padding_share(experience.mask, self.guard.microbatch.rows),
            seconds=IterationSeconds(
                rollout=rollout_s,
                score=score_s,
                update=self.updated - started,
                other=other_s,
            ),
            compute=compute,
            group_size=self.config.group_size,
        )
        if self.logs_headline:
            self.log_dict(result.headline, prog_bar=True)
            self.log("step", float(self.iteration))  # the step that Lightning's loggers use
        return {RESULT: result}

    @cached_property
    def role_flops(self) -> RoleFlops:
        """Return the sizes of the models, from which the operations of an iteration follow."""
        return RoleFlops.of(self.roles, self.critic)

    def collect(self, prompts: Prompts) -> tuple[IterationBatch, float, float]:
        """Return the batch of an iteration, and the seconds of sampling and of scoring.

        Raises: PolicyLogitsError where nothing can be sampled, RewardError where the reward gives
            no numbers; both name the iteration.
        """
        number = f"iteration {self.iteration + 1}"
        generator = self.generator(TRAINING, self.iteration)
        started = time.perf_counter()
        rollout = self.roll_out(prompts, generator, self.config.samples_per_prompt, during=number)
        rolled_out = time.perf_counter()
        try:
            scores = self.score(self.decode(rollout, "train"))
        except RewardError as error:
            raise RewardError(f"{number}: {error}") from error
        experience = make_experience(
            rollout,
            scores,
            self.config,
            kl_coef=self.kl_coef,
            moments=self.moments.including(scores),
            terms=self.reward.terms,
        )
        scored, shuffle = time.perf_counter(), generator.get_state()
        batch = IterationBatch(experience=experience, kl_coef=self.kl_coef, shuffle=shuffle)
        return batch, rolled_out - started, scored - rolled_out

    def learn(self, batch: IterationBatch) -> tuple[UpdateStats, ...]:
        """Make ppo_epochs passes over shuffled minibatches, until target_kl ends them.

        Raises: NotFiniteError as `UpdateGuard.accepts`.
        """
        config, updates = self.config, []
        for minibatch in minibatches(
            batch.experience,
            ppo_epochs=config.ppo_epochs,
            minibatch_size=config.minibatch_size,
            generator=batch.generator(),
        ):
            if config.whiten_advantages == "minibatch":
                minibatch = whitened(minibatch)
            try:
                updates.append(self.update(minibatch, batch.kl_coef))
            except NotFiniteError as error:
                error.rewards_overflow = rewards_overflow(batch.experience)
                raise
            if config.target_kl is not None and updates[-1].stopped:
                break
        return tuple(updates)

    def update(self, minibatch: Experience, kl_coef: float) -> UpdateStats:
        """Make one optimizer step on the minibatch, unless a limit prevents it."""
        terms, grad_norm = self.gradient(
            minibatch, kl_coef, policy_learns=self.iteration >= self.config.critic_warmup
        )
        # Before the limits: an infinite ratio exceeds one, and must still count as not finite.
        is_finite = self.guard.accepts(self, terms.loss, grad_norm)
        stopped = is_finite and exceeds(terms.approx_kl, self.config.target_kl)
        skipped = is_finite and exceeds(terms.ratio_mean, self.config.max_ratio)
        if is_finite and not (stopped or skipped):
            step(self)
        return UpdateStats(
            **vars(terms),
            grad_norm=grad_norm,
            stopped=terms.loss.new_tensor(stopped),
            skipped=terms.loss.new_tensor(skipped),
            nonfinite=terms.loss.new_tensor(not is_finite),
        )

    @halving_microbatches
    def gradient(
        self, minibatch: Experience, kl_coef: float, *, policy_learns: bool
    ) -> tuple[PPOTerms, Float[Tensor, ""]]:
        """Backpropagate the loss of a minibatch, one micro-batch after another, and clip.

        Returns: the terms of the minibatch, and the norm of its gradient before clipping.
        """
        config, size = self.config, self.guard.microbatch.rows
        minibatch = minibatch.select(by_length(minibatch.mask))
        mask, tokens = minibatch.response_mask, minibatch.response_mask.sum()
        weights = token_weights(
            mask, config.loss_reduction, max_response_tokens=config.max_response_tokens
        )
        critic_apart = self.critic is not None and not self.critic.shares_trunk
        zero_gradients(self)
        loss, terms = torch.zeros((), device=self.device), []
        for micro_batch, weight in zip(minibatch.split(size), weights.split(size), strict=True):
            terms_of = partial(self.loss_terms, micro_batch, weight, tokens, kl_coef)
            with torch.set_grad_enabled(policy_learns):
                hidden = response_hidden(self.roles, micro_batch)
                policy = self.policy_outputs(hidden, micro_batch)
            if policy_learns and critic_apart:
                # Two backward passes: the first frees the policy's activations for the second.
                of_policy = self.backpropagate(terms_of(policy=policy, values=None))
                values = self.values(hidden, micro_batch)
                of_critic = self.backpropagate(terms_of(policy=None, values=values))
                loss = loss + of_policy.loss + of_critic.loss
                terms.append(sum_terms([of_policy, of_critic]))
            else:  # also where the critic learns alone: the policy's outputs have no graph then
                values = self.values(hidden, micro_batch)
                of_both = self.backpropagate(terms_of(policy=policy, values=values))
                loss = loss + of_both.loss
                terms.append(of_both)
        grad_norm = clip_gradients(self, config.max_grad_norm)
        # The loss that was backpropagated, in the order of the passes.
        return replace(sum_terms(terms), loss=loss), grad_norm

    def loss_terms(
        self,
        micro_batch: Experience,
        weights: Float[Tensor, "B T"],
        tokens: Int[Tensor, ""],
        kl_coef: float,
        *,
        policy: PolicyOutputs | None,
        values: Float[Tensor, " N"] | None,
    ) -> PPOTerms:
        """Return the loss and statistics of a micro-batch, as `ppo_terms`.

        A subclass adds terms of its own to the loss here.
        """
        return ppo_terms(
            micro_batch, weights, tokens, self.config, kl_coef=kl_coef, policy=policy, values=values
        )

    def backpropagate(self, terms: PPOTerms) -> PPOTerms:
        """Add the gradient of the terms' loss; return them without a graph."""
        return replace(terms, loss=backward(self, terms.loss))

    def policy_outputs(
        self, hidden: Float[Tensor, "N d"], micro_batch: Experience
    ) -> PolicyOutputs:
        """Return the policy's predictions for a micro-batch; hidden: its hidden states there."""
        config, vocabulary_kl = self.config, None
        logprobs, entropy = response_logprobs(
            self.roles, hidden, micro_batch, config.temperature, learn_entropy=config.ent_coef > 0
        )
        if config.kl_in == "loss" and config.kl_estimator == "full":
            with torch.no_grad(), self.roles.use_role(REFERENCE):
                ref_hidden = response_hidden(self.roles, micro_batch)
            vocabulary_kl = response_kl(self.roles, hidden, ref_hidden, config.temperature)
        return PolicyOutputs(logprobs=logprobs, entropy=entropy, vocabulary_kl=vocabulary_kl)

    def values(
        self, hidden: Float[Tensor, "N d"], micro_batch: Experience
    ) -> Float[Tensor, " N"] | None:
        """Return the critic's values of a micro-batch; hidden: the policy's hidden states there."""
        if self.critic is None:
            return None
        return self.critic.values(micro_batch, policy_hidden=hidden)

    def validation_step(  # type: ignore[override]
        self, prompts: Prompts, batch_idx: int
    ) -> EvaluationResult:
        """Sample and score held-out prompts, with the same random numbers at every evaluation.

        Raises: PolicyLogitsError where nothing can be sampled, after which iteration.
        """
        rollout = self.roll_out(
            prompts,
            self.generator(EVALUATION, batch_idx),
            during=f"the evaluation after iteration {self.iteration}",
        )
        decoded = self.decode(rollout, "val")
        return EvaluationResult(rollout=rollout, decoded=decoded, scores=self.score(decoded))

    @halving_microbatches
    def predict_step(self, batch: IterationBatch, batch_idx: int) -> PPOPredictions:
        """Return log-probabilities and values of given responses under the current models."""
        logprobs, values = predict(
            batch.experience,
            self.roles,
            self.critic,
            self.config.temperature,
            self.guard.microbatch.rows,
        )
        return PPOPredictions(logprobs=logprobs, values=values)

    def roll_out(
        self,
        prompts: Prompts,
        generator: torch.Generator,
        samples_per_prompt: int = 1,
        *,
        during: str = "sampling",
    ) -> Rollout:
        """Return responses of the current policy, with its log-probabilities and the values.

        Raises: PolicyLogitsError where nothing can be sampled `during` the iteration or evaluation;
            SamplingMemoryError where the responses do not fit into the memory all at once.
        """
        try:
            sampled = self.sampler.sample(prompts, samples_per_prompt, generator)
        except LogitsError as error:
            raise PolicyLogitsError(
                during, iterations=self.iteration, nonfinite=self.guard.nonfinite
            ) from error
        except torch.OutOfMemoryError as error:
            raise SamplingMemoryError(len(prompts) * samples_per_prompt, str(error)) from error
        return self.annotate(sampled)

    @halving_microbatches
    def annotate(self, sampled: SampledResponses) -> Rollout:
        """Return the responses with the predictions that the sampler does not know."""
        return annotate(
            sampled,
            self.roles,
            self.critic,
            is_exact=self.sampler.is_exact,
            temperature=self.config.temperature,
            batch_size=self.guard.microbatch.rows,
        )

    def decode(self, rollout: Rollout, split: str) -> DecodedResponses:
        """Return the rollout with its text and the rows of `split` that hold its prompts."""
        return decode_responses(rollout, self.prompts[split], self.chat)

    @halving_microbatches
    def score(self, decoded: DecodedResponses) -> Scores:
        """Return the scores of the reward and of the reference."""
        config = self.config
        return score(
            self.roles,
            decoded,
            self.reward,
            temperature=config.temperature,
            batch_size=self.guard.microbatch.rows,
            over_vocabulary=config.kl_estimator == "full" and config.kl_in == "reward",
        )

    def on_fit_start(self) -> None:
        """Raise ConfigError unless there is one process: whitening and moments are those of one."""
        self.updated = time.perf_counter()
        require(self.trainer.world_size == 1, "the number of processes", self.trainer.world_size,
                "1: PPO runs in one process")  # fmt: skip

    def generator(self, stream: int, number: int) -> torch.Generator:
        """Return a new generator on the CPU, a pure function of (seed, stream, number)."""
        sequence = np.random.SeedSequence((self.seed, stream, number))
        return torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))

    def prompt_rows(self, split: str) -> Sequence[dict[str, Any]]:
        """Return the rows of the "train" or "val" prompts, with their text under "prompt"."""
        return self.prompts[split]

    def configure_optimizers(self) -> Any:
        groups = [(1.0, self.roles.trained_by(POLICY))]
        if self.critic is not None:
            groups.append((self.config.value_lr_factor, self.critic.parameters()))
        return build_optimizer(groups, self.config, self.config.iterations)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return trainable_state(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["iteration"] = self.iteration
        checkpoint["kl_coef"] = self.kl_coef
        checkpoint["learner"] = self.guard.state_dict()
        checkpoint["moments"] = {
            "whole": asdict(self.moments.whole),
            "parts": [asdict(part) for part in self.moments.components],
        }

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        check_parameters(self, checkpoint)
        self.iteration = checkpoint["iteration"]
        self.kl_coef = checkpoint["kl_coef"]
        self.guard.load_state_dict(checkpoint["learner"])
        moments = checkpoint["moments"]
        self.moments = ScoreMoments(
            RunningMoments(**moments["whole"]),
            tuple(RunningMoments(**part) for part in moments["parts"]),
        )


def exceeds(found: Tensor, limit: float | None) -> bool:
    """Return whether a 0-d tensor is above a limit; False for NaN and without a limit."""
    return limit is not None and bool(found > limit)
