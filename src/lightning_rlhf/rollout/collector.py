"""The collection of scored responses: sample, annotate, decode, score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.masking import by_length, real_tokens
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.records import DecodedResponses, Prompts, Rollout, SampledResponses, Scores
from lightning_rlhf.data.batches import pad
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Message
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.parallel.replicas import ONE, Replicas
from lightning_rlhf.rewards.weighted import Reward, Source, checked
from lightning_rlhf.rollout.build_sampler import build_sampler
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import Sampler, SamplingParams, Share
from lightning_rlhf.rollout.score import Critic, annotate, score

AT_ONCE = 256
"""Number of texts that are encoded at once; each source splits them into smaller batches."""


def decode_responses(
    rollout: SampledResponses, rows: Sequence[Mapping[str, Any]], chat: ChatFormat
) -> DecodedResponses:
    """Return the responses of a rollout as text, with the data rows of their prompts."""
    return DecodedResponses(
        rollout=rollout,
        rows=[rows[index] for index in rollout.index.tolist()],
        responses=[
            chat.decode_response(tokens)
            for tokens in real_tokens(rollout.responses, rollout.response_mask)
        ],
    )


def encode_responses(
    rows: Sequence[Mapping[str, Any]], responses: Sequence[str], chat: ChatFormat
) -> DecodedResponses:
    """Return texts as responses of the policy: left-padded prompts, an end token after each."""
    prompts = [chat.prompt_tokens(tuple(map(Message.of, row["messages"]))) for row in rows]
    encoded = [chat.response_tokens(text) for text in responses]
    rollout = as_responses(prompts, encoded, chat.pad_token_id)
    return DecodedResponses(rollout=rollout, rows=rows, responses=responses)


def as_responses(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int
) -> SampledResponses:
    """Return given responses, as tokens with their end tokens, in the form of sampled ones."""
    prompt, prompt_mask = pad(prompts, pad_id, "left")
    response, response_mask = pad(responses, pad_id, "right")
    return SampledResponses(
        tokens=torch.cat([prompt, response], dim=1),
        mask=torch.cat([prompt_mask, response_mask], dim=1),
        response_mask=response_mask,
        ended=torch.ones(len(prompts), dtype=torch.bool),
        logprobs=None,
        values=None,
        index=torch.arange(len(prompts)),
    )


@torch.no_grad()
def score_texts(
    source: Source,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    responses: Sequence[str],
    chat: ChatFormat,
    device: torch.device,
) -> Float[Tensor, " B"]:
    """Return a source's scores of texts, encoded as PPO's own responses are; on the CPU."""
    parts = []
    for start in range(0, len(rows), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        decoded = encode_responses(rows[some], responses[some], chat)
        decoded = DecodedResponses(
            rollout=decoded.rollout.to(device), rows=decoded.rows, responses=decoded.responses
        )
        parts.append(checked(source(decoded), decoded, name).cpu())
    return torch.cat(parts)


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
        replicas: Replicas = ONE,
    ) -> None:
        """Make the collector; the arguments are those of `PPOModule`."""
        self.replicas = replicas
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
        self.generation_rows = MicrobatchSize(
            f"{stage}.generation_batch_size",
            config.generation_batch_size or config.rollout_batch_size,
        )
        """Number of responses that are sampled at a time."""
        params = SamplingParams(
            max_response_tokens=config.max_response_tokens,
            temperature=config.temperature,
            end_token_ids=chat.end_token_ids,
            stop=chat.stop_at(config.stop_strings),
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

        Each process samples and annotates its share of the prompts. Where the memory runs out,
        fewer are sampled at a time.

        Raises: LogitsError where nothing can be sampled; TrainingError where the responses to one
            prompt are too much for the memory; SamplerError as `CheckedSampler.sample`.
        """
        mine = Share(self.replicas.share(by_length(prompts.mask)), len(prompts))
        return self.replicas.joined(
            mine.responses(samples_per_prompt),
            lambda _: self.annotate(self.sample(prompts, mine, generator, samples_per_prompt)),
        )

    def sample(
        self, prompts: Prompts, share: Share, generator: torch.Generator, samples_per_prompt: int
    ) -> SampledResponses:
        """Return the responses to a share of the prompts, as many at a time as fit into memory."""
        start = generator.get_state()

        def at_a_time(count: int) -> list[SampledResponses]:
            parts = []
            for rows in share.rows.split(max(1, count // samples_per_prompt)):
                generator.set_state(start)
                part = Share(rows, share.total)
                parts.append(self.sample_at_once(prompts, part, generator, samples_per_prompt))
            return parts

        return SampledResponses.joined(self.generation_rows.fitting(at_a_time))

    def sample_at_once(
        self, prompts: Prompts, share: Share, generator: torch.Generator, samples_per_prompt: int
    ) -> SampledResponses:
        """Return the responses to a share of the prompts, sampled together.

        The native sampler draws the same numbers for a response in every share. Another sampler is
        given a generator for each share that is not the whole batch.
        """
        some = prompts.select(share.rows)
        if isinstance(self.sampler, NativeSampler):
            return self.sampler.sample(some, samples_per_prompt, generator, share)
        if len(some) == share.total:
            return self.sampler.sample(some, samples_per_prompt, generator)
        seed = int(torch.randint(2**62, (), generator=generator)) + int(share.rows[0])
        own = torch.Generator().manual_seed(seed)
        return self.sampler.sample(some, samples_per_prompt, own)

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
        """Return the scores of the reward and of the reference; each process scores its share.

        Raises: RewardError where the reward gives no number for a response.
        """
        config = self.config
        mine = self.replicas.share(by_length(decoded.rollout.mask))
        return self.replicas.joined(
            mine,
            lambda some: self.microbatch.fitting(
                lambda rows: score(
                    self.roles,
                    decoded.select(some),
                    self.reward,
                    temperature=config.temperature,
                    batch_size=rows,
                    over_vocabulary=config.kl_estimator == "full" and config.kl_in == "reward",
                )
            ),
        )
