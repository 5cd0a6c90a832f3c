"""The collection of scored responses: sample, annotate, decode, score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from lightning_rlhf.core.device_memory import MicrobatchSize
from lightning_rlhf.core.errors import SamplingMemoryError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.results import Compute, PPOPredictions
from lightning_rlhf.core.types import (
    DecodedResponses,
    Experience,
    Prompts,
    Rollout,
    SampledResponses,
    Scores,
)
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.annotate import annotate, predict
from lightning_rlhf.rollout.build_sampler import build_sampler
from lightning_rlhf.rollout.compute import RoleFlops, iteration_compute
from lightning_rlhf.rollout.critic import Critic
from lightning_rlhf.rollout.decoded import decode_responses
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import Sampler, SamplingParams
from lightning_rlhf.rollout.score import score


class Collector:
    """Samples responses of the active role, and has models and reward read them.

    Forward passes take as many rows as fit into memory; a size that was halved stays so.
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
        microbatch: MicrobatchSize,
        sampler: Sampler | None,
        stage: str = "ppo",
    ) -> None:
        """Make the collector; the arguments are those of `PPOModule`."""
        self.roles = roles
        self.reward = reward
        self.config = config
        self.critic = critic
        self.chat = chat
        self.prompts = prompts
        self.microbatch = microbatch
        """Number of rows that a critic apart, reward and reference read at a time."""
        self.annotation_rows = MicrobatchSize(
            "the number of rows annotated at a time", config.rollout_batch_size
        )
        """Number of rows that the policy reads at a time, for a sampler without its numbers."""
        params = SamplingParams(
            max_response_tokens=config.max_response_tokens,
            temperature=config.temperature,
            end_token_ids=chat.end_token_ids,
            stop=chat.stop_at(config.stop_strings),
            is_static=config.cuda_graphs,
        )
        self.sampler = sampler or build_sampler(
            config.rollout, roles, params, critic, key=f"{stage}.rollout"
        )
        self.annotated = not isinstance(self.sampler, NativeSampler)
        """True if the policy read the latest responses for log-probabilities or values."""

    def roll_out(
        self, prompts: Prompts, generator: torch.Generator, samples_per_prompt: int = 1
    ) -> Rollout:
        """Return responses of the active role, with its log-probabilities and the values.

        Raises: LogitsError where nothing can be sampled; SamplingMemoryError where the responses do
            not fit into the memory all at once; SamplerError as `CheckedSampler.sample`.
        """
        try:
            sampled = self.sampler.sample(prompts, samples_per_prompt, generator)
        except torch.OutOfMemoryError as error:
            raise SamplingMemoryError(len(prompts) * samples_per_prompt, str(error)) from error
        return self.annotate(sampled)

    def annotate(self, sampled: SampledResponses) -> Rollout:
        """Return the responses with the predictions that the sampler does not know."""
        on_trunk = self.critic is not None and self.critic.shares_trunk
        given = [sampled.logprobs, *([sampled.values] if on_trunk else [])]
        self.annotated = not self.sampler.is_exact or any(numbers is None for numbers in given)
        return self.microbatch.fitting(
            lambda rows: annotate(
                sampled,
                self.roles,
                self.critic,
                is_exact=self.sampler.is_exact,
                temperature=self.config.temperature,
                policy_rows=self.annotation_rows,
                batch_size=rows,
            )
        )

    def decode(self, rollout: Rollout, split: str) -> DecodedResponses:
        """Return the rollout with its text and the rows of `split` that hold its prompts."""
        return decode_responses(rollout, self.prompts[split], self.chat)

    def score(self, decoded: DecodedResponses) -> Scores:
        """Return the scores of the reward and of the reference.

        Raises: RewardError where the reward gives no number for a response.
        """
        config = self.config
        return self.microbatch.fitting(
            lambda rows: score(
                self.roles,
                decoded,
                self.reward,
                temperature=config.temperature,
                batch_size=rows,
                over_vocabulary=config.kl_estimator == "full" and config.kl_in == "reward",
            )
        )

    def predict(self, experience: Experience) -> PPOPredictions:
        """Return log-probabilities and values of given responses under the current models."""
        logprobs, values = self.microbatch.fitting(
            lambda rows: predict(experience, self.roles, self.critic, self.config.temperature, rows)
        )
        return PPOPredictions(logprobs=logprobs, values=values)

    def compute(self, experience: Experience, *, updates: int, policy_learns: bool) -> Compute:
        """Return the tokens and operations of an iteration, as `iteration_compute`.

        updates: number of minibatches that were read.
        policy_learns: False during ppo.critic_warmup.
        """
        return iteration_compute(
            self.role_flops,
            self.reward,
            self.sampler,
            self.config,
            experience,
            updates=updates,
            microbatch_size=self.microbatch.rows,
            policy_learns=policy_learns,
            annotated=self.annotated,
        )

    @cached_property
    def role_flops(self) -> RoleFlops:
        """Return the sizes of the models, from which the operations of an iteration follow."""
        return RoleFlops.of(self.roles, self.critic)
