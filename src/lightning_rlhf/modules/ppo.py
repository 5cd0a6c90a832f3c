"""Proximal policy optimization from a reward model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_rlhf.core.errors import (
    DivergedError,
    NotFiniteError,
    RewardError,
    TrainingError,
    require,
)
from lightning_rlhf.core.experience import make_experience, minibatches, whitened
from lightning_rlhf.core.kl import ESTIMATORS, adapted_coef, k3, linear_coef
from lightning_rlhf.core.losses import policy_loss, token_weights, value_loss
from lightning_rlhf.core.masking import by_length
from lightning_rlhf.core.memory import BatchSize
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.shaping import RunningMoments, ScoreMoments, is_overpaid
from lightning_rlhf.core.types import (
    Collected,
    Experience,
    Prompts,
    Replies,
    Rollout,
    Scores,
    UpdateStats,
)
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.models.roles import POLICY, REFERENCE, Roles
from lightning_rlhf.modules.learner import Learner
from lightning_rlhf.modules.optim import (
    advance_schedule,
    build_optimizer,
    check_parameters,
    step,
    trainable_state,
)
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout import generate as native
from lightning_rlhf.rollout import hf
from lightning_rlhf.rollout.critic import Critic
from lightning_rlhf.rollout.draft import DIVERGED
from lightning_rlhf.rollout.generate import no_value
from lightning_rlhf.rollout.replies import said
from lightning_rlhf.rollout.score import (
    all_logprobs,
    padding_share,
    response_hidden,
    response_kl,
    response_logprobs,
    score,
)

ROLLOUTS = {"native": native.generate, "hf": hf.generate}
OVERPAID = (
    "The rewards were infinite, or their squares were, before the first update of the iteration: "
    "the reward is too large. ppo.score_clip bounds it, and so does the clip of a reward's "
    "component. Start anew (overwrite=true or job=NAME) with one"
)
TRAINING, EVALUATION = 0, 1  # streams of random numbers


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
        microbatch: BatchSize | None = None,
    ) -> None:
        """`critic` for advantage=gae, None for the others; `prompts`: split -> rows of the data.

        `microbatch`: the size that the reward's model reads by, to be halved for both at once.
        """
        super().__init__()
        require((critic is not None) == config.has_critic, "the critic", critic,
                f"one for ppo.advantage=gae, else None; it is {config.advantage}")  # fmt: skip
        require(config.rollout != "native" or roles.caches, "ppo.rollout", config.rollout,
                f"hf, for {roles.causal_lm.config.model_type}, which takes no cache")  # fmt: skip
        self.automatic_optimization = False
        self.strict_loading = False
        self.roles = roles
        self.reward = reward
        self.config = config
        self.critic = critic
        if critic is not None:
            self.critic_roles = critic.roles  # so that Lightning moves and saves it
        self.chat = chat
        self.stop = chat.stop_at(config.stop_strings)
        self.prompts = prompts
        self.seed = seed
        self.learner = Learner("ppo", config, microbatch)
        self.iteration = 0
        """Finished iterations, over all resumes."""
        self.kl_coef = config.kl_coef
        """Of this iteration."""
        self.moments = ScoreMoments.none(len(reward.terms))
        """Of all scores so far."""
        self.updated = time.perf_counter()
        """When the last iteration ended."""
        self.collected: Collected | None = None
        """What the latest iteration learned from, or the one under way learns from."""
        roles.play(POLICY)

    def training_step(self, batch: Prompts | Collected, batch_idx: int) -> dict[str, Any]:
        """Collect from prompts, then learn; what was collected before is learned from once more."""
        other = time.perf_counter() - self.updated
        collected, seconds = self.collect(batch) if isinstance(batch, Prompts) else (batch, {})
        self.collected = collected
        experience = collected.experience
        started = time.perf_counter()
        updates = tuple(self.updates(experience, collected.generator()))
        self.updated = time.perf_counter()
        advance_schedule(self)
        # Not before the update: what ends it leaves the iteration unbegun.
        self.moments = self.moments.including(experience)
        self.kl_coef = self.next_kl_coef(experience)
        self.iteration += 1
        return {
            "experience": experience,
            "updates": updates,
            "kl_coef": collected.kl_coef,
            "padding": padding_share(experience.mask, self.learner.microbatch.rows),
            "seconds": {**seconds, "update": self.updated - started, "other": other},
        }

    def collect(self, prompts: Prompts) -> tuple[Collected, dict[str, float]]:
        """Sample and score: what to learn from, and the seconds that either took.

        Raises TrainingError where nothing can be sampled, RewardError where the reward gives no
        numbers; both name the iteration.
        """
        generator = self.generator(TRAINING, self.iteration)
        started = time.perf_counter()
        try:
            rollout = self.generate(prompts, generator, self.config.samples_per_prompt)
        except DivergedError as error:
            raise TrainingError(self.diverged(f"iteration {self.iteration + 1}")) from error
        rollout = self.valued(rollout)
        rolled_out = time.perf_counter()
        try:
            scores = self.score(self.said(rollout, "train"))
        except RewardError as error:
            raise RewardError(f"iteration {self.iteration + 1}: {error}") from error
        experience = make_experience(
            rollout,
            scores,
            self.config,
            kl_coef=self.kl_coef,
            moments=self.moments.including(scores),
            terms=self.reward.terms,
        )
        seconds = {"rollout": rolled_out - started, "score": time.perf_counter() - rolled_out}
        shuffle = generator.get_state()
        return Collected(experience=experience, kl_coef=self.kl_coef, shuffle=shuffle), seconds

    def predict_step(self, batch: Collected, batch_idx: int) -> dict[str, Tensor | None]:
        """What policy and critic as they are now say of responses: logprobs, values, [B, T]."""
        size, values = self.learner.microbatch.rows, None
        if self.critic is not None:
            values = self.critic.all_values(batch.experience, size)
        logprobs = all_logprobs(self.roles, batch.experience, self.config.temperature, size)
        return {"logprobs": logprobs, "values": values}

    def validation_step(self, prompts: Prompts, batch_idx: int) -> dict[str, Any]:
        """Sample and score held-out prompts; the same draws at every evaluation.

        Raises TrainingError where nothing can be sampled, after which iteration.
        """
        try:
            rollout = self.generate(prompts, self.generator(EVALUATION, batch_idx))
        except DivergedError as error:
            where = f"the evaluation after iteration {self.iteration}"
            raise TrainingError(self.diverged(where)) from error
        replies = self.said(rollout, "val")
        return {"replies": replies, "scores": self.score(replies)}

    def generate(
        self, prompts: Prompts, generator: torch.Generator, samples_per_prompt: int = 1
    ) -> Rollout:
        """Responses of the policy as it is now, its log-probabilities, a critic's on its trunk.

        Raises TrainingError where they do not fit into the device's memory all at once.
        """
        critic = self.critic
        try:
            return ROLLOUTS[self.config.rollout](
                self.roles,
                prompts,
                value=critic.head if critic is not None and critic.shares_trunk else no_value,
                max_response_tokens=self.config.max_response_tokens,
                temperature=self.config.temperature,
                end_token_ids=self.chat.end_token_ids,
                samples_per_prompt=samples_per_prompt,
                stop=self.stop,
                generator=generator,
            )
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"{len(prompts) * samples_per_prompt} responses are sampled at once, which is too "
                f"much for the memory of the device: {error} A smaller ppo.rollout_batch_size or "
                "ppo.max_response_tokens needs less"
            ) from error

    def diverged(self, where: str) -> str:
        """Return why there are no responses of the policy as it is now, and how to go on.

        where: what they were to be sampled for.
        """
        said = f"{where}: {DIVERGED}. "
        if self.iteration == 0:
            return said + "No update was made yet: so is the model that the run starts from"
        count = self.learner.nonfinite
        if count:
            ones = "The last update" if count == 1 else f"The last {count} updates"
            said += f"{ones} before it had a loss or gradient that is not finite, and "
            said += "was not made. " if count == 1 else "were not made. "
        return (
            f"{said}A smaller ppo.lr may hold the model: start anew (overwrite=true or job=NAME) "
            "with one, since a resumed run keeps its numbers"
        )

    def valued(self, rollout: Rollout) -> Rollout:
        """The rollout with the values of a critic that is not on the policy's trunk."""
        if self.critic is None or self.critic.shares_trunk:
            return rollout
        valued = partial(self.critic.all_values, rollout)
        return replace(rollout, values=self.learner.microbatch.fitting(valued))

    def said(self, rollout: Rollout, split: str) -> Replies:
        """The rollout with its text and the rows of `split` that it answers."""
        return said(rollout, self.prompts[split], self.chat)

    def score(self, replies: Replies) -> Scores:
        """What the reward and the reference say."""
        config = self.config
        return self.learner.microbatch.fitting(
            lambda size: score(
                self.roles,
                replies,
                self.reward,
                temperature=config.temperature,
                batch_size=size,
                over_vocabulary=config.kl_estimator == "full" and config.kl_in == "reward",
            )
        )

    def updates(self, experience: Experience, generator: torch.Generator) -> Iterator[UpdateStats]:
        """ppo_epochs over shuffled minibatches, until target_kl ends them.

        Raises NotFiniteError as `Learner.accepts`; it says where the reward is too large.
        """
        for minibatch in minibatches(
            experience,
            ppo_epochs=self.config.ppo_epochs,
            minibatch_size=self.config.minibatch_size,
            generator=generator,
        ):
            if self.config.whiten_advantages == "minibatch":
                minibatch = whitened(minibatch)
            try:
                stats = self.update(minibatch)
            except NotFiniteError as error:
                if is_overpaid(experience):
                    raise NotFiniteError(error.args[0], OVERPAID) from error
                raise
            yield stats
            if self.config.target_kl is not None and stats.stopped:
                return

    def update(self, minibatch: Experience) -> UpdateStats:
        """One optimizer step on the minibatch, in micro-batches, unless a limit forbids it."""
        parts: list[dict[str, Tensor]] = []
        losses = partial(self.losses, minibatch, parts)
        loss, grad_norm = self.learner.gradient(self, losses)
        facts = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        ratio_max = facts.pop("ratio_max").max()
        means = {name: shares.sum() for name, shares in facts.items()}
        # Before the limits: an infinite ratio is above one, and is to be counted all the same.
        is_finite = self.learner.accepts(self, loss, grad_norm)
        stopped = is_finite and exceeds(means["approx_kl"], self.config.target_kl)
        skipped = is_finite and exceeds(means["ratio_mean"], self.config.max_ratio)
        if is_finite and not (stopped or skipped):
            step(self)
        return UpdateStats(
            loss=loss,
            grad_norm=grad_norm,
            ratio_max=ratio_max,
            stopped=loss.new_tensor(stopped),
            skipped=loss.new_tensor(skipped),
            nonfinite=loss.new_tensor(not is_finite),
            **means,
        )

    def losses(
        self, minibatch: Experience, facts: list[dict[str, Tensor]], size: int
    ) -> Iterator[Tensor]:
        """The loss of each micro-batch of `size`, as its share of that of the whole minibatch.

        A critic that is not on the policy's trunk has a loss of its own, behind the policy's.
        What is to be known of each micro-batch stands in `facts` in the end, as shares likewise.
        """
        facts.clear()
        config = self.config
        minibatch = minibatch.select(by_length(minibatch.mask))
        tokens = minibatch.response_mask.sum()
        weights = token_weights(
            minibatch.response_mask,
            config.loss_reduction,
            max_response_tokens=config.max_response_tokens,
        )
        for part, weight in zip(minibatch.split(size), weights.split(size), strict=True):
            mask = part.response_mask
            with torch.set_grad_enabled(self.iteration >= config.critic_warmup):
                hidden = response_hidden(self.roles, part)
                logprobs, entropy = response_logprobs(
                    self.roles, hidden, part, config.temperature, learn_entropy=config.ent_coef > 0
                )
                policy = self.policy_loss(logprobs, part)
                kl = self.kl_loss(logprobs, hidden, part)
            loss = policy + self.kl_coef * kl
            if config.ent_coef > 0:
                loss = loss - config.ent_coef * entropy
            if loss.requires_grad and self.critic is not None and not self.critic.shares_trunk:
                yield (weight[mask] * loss).sum()  # the policy's activations are gone after it
                loss = torch.zeros_like(loss)
            value, value_clipped = self.value_loss(hidden, part)
            loss = loss + config.vf_coef * value
            with torch.no_grad():
                ratio = torch.exp(logprobs - part.old_logprobs[mask])
                high = config.clip_range_high or config.clip_range
                outside = (ratio < 1 - config.clip_range) | (ratio > 1 + high)
                means = {
                    "entropy": entropy,
                    "approx_kl": k3(part.old_logprobs[mask], logprobs),
                    "clip_fraction": outside.float(),
                    "value_clip_fraction": value_clipped.float(),
                    "ratio_mean": ratio,
                }
                sums = {"policy_loss": policy, "kl_loss": kl, "value_loss": value}
                facts.append(
                    {name: x.sum() / tokens for name, x in means.items()}
                    | {name: (weight[mask] * x).sum() for name, x in sums.items()}
                    | {"ratio_max": ratio.max()}
                )
            yield (weight[mask] * loss).sum()

    def policy_loss(self, logprobs: Tensor, part: Experience) -> Tensor:
        """The clipped surrogate of each response token, [N]."""
        mask, config = part.response_mask, self.config
        return policy_loss(
            logprobs,
            part.old_logprobs[mask],
            part.advantages[mask],
            clip_range=config.clip_range,
            clip_range_high=config.clip_range_high,
            dual_clip=config.dual_clip,
        )

    def kl_loss(self, logprobs: Tensor, hidden: Tensor, part: Experience) -> Tensor:
        """The KL to the reference of each response token, [N], where ppo.kl_in=loss; else 0."""
        if self.config.kl_in == "reward":
            return torch.zeros_like(logprobs)
        if self.config.kl_estimator == "full":
            with torch.no_grad(), self.roles.acting(REFERENCE):
                ref_hidden = response_hidden(self.roles, part)
            return response_kl(self.roles, hidden, ref_hidden, self.config.temperature)
        estimator = ESTIMATORS[self.config.kl_estimator]
        return estimator(logprobs, part.ref_logprobs[part.response_mask])

    def value_loss(self, hidden: Tensor, part: Experience) -> tuple[Tensor, Tensor]:
        """The critic's loss of each response token, [N], and whether its value left its range."""
        mask, clip_range_vf = part.response_mask, self.config.clip_range_vf
        old_values = part.old_values[mask]
        if self.critic is None:
            return torch.zeros_like(old_values), torch.zeros_like(old_values)
        critic = self.critic
        values = critic.head(hidden) if critic.shares_trunk else critic.values(part)
        loss = value_loss(values, old_values, part.returns[mask], clip_range_vf=clip_range_vf)
        limit = math.inf if clip_range_vf is None else clip_range_vf
        return loss, (values - old_values).abs() > limit

    def next_kl_coef(self, experience: Experience) -> float:
        """Of the iteration after this one."""
        config = self.config
        match config.kl_control:
            case "fixed":
                return self.kl_coef
            case "linear":
                return linear_coef(
                    config.kl_coef, config.kl_coef_end, self.iteration + 1, config.iterations
                )
            case "adaptive":
                return adapted_coef(
                    self.kl_coef,
                    experience.kl.sum(dim=1).mean().item(),
                    target=config.kl_target,
                    horizon=config.kl_horizon,
                    episodes=len(experience),
                )

    def on_fit_start(self) -> None:
        """Whitening, moments and token counts are those of one process."""
        self.updated = time.perf_counter()
        require(self.trainer.world_size == 1, "the number of processes", self.trainer.world_size,
                "1: PPO runs in one process")  # fmt: skip

    def generator(self, stream: int, number: int) -> torch.Generator:
        """A fresh generator on the CPU, a pure function of (seed, stream, number)."""
        sequence = np.random.SeedSequence((self.seed, stream, number))
        return torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))

    def prompt_rows(self, split: str) -> Sequence[dict[str, Any]]:
        """Rows of the "train" or "val" prompts, with their text under "prompt"."""
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
        checkpoint["learner"] = self.learner.state_dict()
        checkpoint["moments"] = {
            "whole": asdict(self.moments.whole),
            "parts": [asdict(part) for part in self.moments.parts],
        }

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        check_parameters(self, checkpoint)
        self.iteration = checkpoint["iteration"]
        self.kl_coef = checkpoint["kl_coef"]
        self.learner.load_state_dict(checkpoint["learner"])
        moments = checkpoint["moments"]
        self.moments = ScoreMoments(
            RunningMoments(**moments["whole"]),
            tuple(RunningMoments(**part) for part in moments["parts"]),
        )


def exceeds(found: Tensor, limit: float | None) -> bool:
    """Whether a 0-d tensor is above a limit, as NaN is not; unread where there is no limit."""
    return limit is not None and bool(found > limit)
