"""Proximal policy optimization from a reward model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_rlhf.core.config import PPOConfig
from lightning_rlhf.core.experience import make_experience, minibatches
from lightning_rlhf.core.kl import k3
from lightning_rlhf.core.losses import policy_loss, value_loss
from lightning_rlhf.core.types import Experience, Prompts, Rollout, Scores, UpdateStats
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.models.roles import POLICY, VALUE, Roles
from lightning_rlhf.modules.optim import (
    advance_schedule,
    build_optimizer,
    check_resumable,
    optimizer_step,
    trainable_state,
)
from lightning_rlhf.rollout.generate import generate
from lightning_rlhf.rollout.score import (
    RewardSource,
    response_hidden,
    response_logprobs,
    score,
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
        reward: RewardSource,
        config: PPOConfig,
        *,
        chat: ChatFormat,
        prompts: Mapping[str, Sequence[dict[str, Any]]],
        seed: int,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        self.roles = roles
        self.reward = reward
        self.config = config
        self.chat = chat
        self.prompts = prompts
        """Split -> rows of the data set, which Prompts.index points into."""
        self.seed = seed
        self.iteration = 0
        """Finished iterations, over all resumes."""
        roles.play(POLICY)

    def training_step(self, prompts: Prompts, batch_idx: int) -> dict[str, Any]:
        generator = self.generator(TRAINING, self.iteration)
        started = time.perf_counter()
        rollout = self.generate(prompts, generator)
        rolled_out = time.perf_counter()
        scores = self.score(rollout)
        experience = make_experience(rollout, scores, self.config)
        scored = time.perf_counter()
        updates = tuple(
            self.update(minibatch)
            for minibatch in minibatches(
                experience,
                ppo_epochs=self.config.ppo_epochs,
                minibatch_size=self.config.minibatch_size,
                generator=generator,
            )
        )
        advance_schedule(self)
        self.iteration += 1
        seconds = {
            "rollout": rolled_out - started,
            "score": scored - rolled_out,
            "update": time.perf_counter() - scored,
        }
        return {
            "experience": experience,
            "updates": updates,
            "kl_coef": self.config.kl_coef,
            "seconds": seconds,
        }

    def validation_step(self, prompts: Prompts, batch_idx: int) -> dict[str, Any]:
        """Sample and score held-out prompts; the same draws at every evaluation."""
        rollout = self.generate(prompts, self.generator(EVALUATION, batch_idx))
        return {"rollout": rollout, "scores": self.score(rollout)}

    def generate(self, prompts: Prompts, generator: torch.Generator) -> Rollout:
        """Responses of the policy as it is now, with its log-probabilities and values."""
        return generate(
            self.roles,
            prompts,
            value=self.roles.heads[VALUE],
            max_response_tokens=self.config.max_response_tokens,
            temperature=self.config.temperature,
            end_token_ids=self.chat.end_token_ids,
            generator=generator,
        )

    def score(self, rollout: Rollout) -> Scores:
        """The reward source's score and the reference's log-probabilities."""
        return score(
            self.roles,
            rollout,
            self.reward,
            temperature=self.config.temperature,
            batch_size=self.config.microbatch_size,
        )

    def update(self, minibatch: Experience) -> UpdateStats:
        """One optimizer step on the minibatch, taken in micro-batches."""
        facts: list[dict[str, Tensor]] = []
        losses = self.losses(minibatch, facts)
        loss, grad_norm = optimizer_step(self, losses, self.config.max_grad_norm)
        summed = {name: torch.stack([f[name] for f in facts]) for name in facts[0]}
        ratio_max = summed.pop("ratio_max").max()
        means = {name: parts.sum() for name, parts in summed.items()}
        return UpdateStats(loss=loss, grad_norm=grad_norm, ratio_max=ratio_max, **means)

    def losses(self, minibatch: Experience, facts: list[dict[str, Tensor]]) -> Iterator[Tensor]:
        """The loss of each micro-batch over the token count of the whole minibatch.

        What is to be known of each micro-batch is appended to `facts`, over the same count.
        """
        config = self.config
        tokens = minibatch.response_mask.sum()
        for part in minibatch.split(config.microbatch_size):
            mask = part.response_mask
            hidden = response_hidden(self.roles, part)
            logprobs, entropy = response_logprobs(self.roles, hidden, part, config.temperature)
            values = self.roles.heads[VALUE](hidden)
            old_logprobs, old_values = part.old_logprobs[mask], part.old_values[mask]
            policy = policy_loss(
                logprobs, old_logprobs, part.advantages[mask], clip_range=config.clip_range
            )
            value = value_loss(
                values, old_values, part.returns[mask], clip_range_vf=config.clip_range_vf
            )
            loss = policy + config.vf_coef * value - config.ent_coef * entropy
            with torch.no_grad():
                ratio = torch.exp(logprobs - old_logprobs)
                per_token = {
                    "policy_loss": policy,
                    "value_loss": value,
                    "entropy": entropy,
                    "approx_kl": k3(old_logprobs, logprobs),
                    "clip_fraction": ((ratio - 1).abs() > config.clip_range).float(),
                    "value_clip_fraction": (
                        (values - old_values).abs() > config.clip_range_vf
                    ).float(),
                    "ratio_mean": ratio,
                }
                facts.append(
                    {name: x.detach().sum() / tokens for name, x in per_token.items()}
                    | {"ratio_max": ratio.max()}
                )
            yield loss.sum() / tokens

    def generator(self, stream: int, number: int) -> torch.Generator:
        """A fresh generator on the CPU, a pure function of (seed, stream, number)."""
        sequence = np.random.SeedSequence((self.seed, stream, number))
        return torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))

    def prompt_rows(self, split: str) -> Sequence[dict[str, Any]]:
        """Rows of the "train" or "val" prompts, with their text under "prompt"."""
        return self.prompts[split]

    def configure_optimizers(self) -> Any:
        groups = [(1.0, self.roles.model), (self.config.value_lr_factor, self.roles.heads[VALUE])]
        return build_optimizer(groups, self.config, self.config.iterations)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return trainable_state(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["iteration"] = self.iteration

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        check_resumable(self, checkpoint)
        self.iteration = checkpoint["iteration"]
