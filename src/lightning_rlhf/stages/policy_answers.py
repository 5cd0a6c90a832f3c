"""Responses of policies to the same prompts, one model in memory at a time, and their scores."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from lightning_rlhf.callbacks.evaluation import Judge, judged_samples
from lightning_rlhf.core.config import ResponsesConfig
from lightning_rlhf.core.errors import LogitsError, TrainingError
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.records import Prompts, Rollout
from lightning_rlhf.core.results import EvaluationResult
from lightning_rlhf.core.text_metrics import perplexity
from lightning_rlhf.data.batches import collate_prompts
from lightning_rlhf.data.lengths import DemonstrationTokens, PromptTokens, tokenise
from lightning_rlhf.data.readers import Rows, sample
from lightning_rlhf.data.rows import Demonstration, Prompt
from lightning_rlhf.io.console import Working
from lightning_rlhf.models.build_roles import (
    check_positions,
    check_room,
    check_vocabulary,
    start_from,
)
from lightning_rlhf.models.checkpoint import Verdict
from lightning_rlhf.models.config import POLICY, REFERENCE, SFT
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.report.comparison import Decoding
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.build_sampler import DealtBatch, count_mine, deal, sample_mine
from lightning_rlhf.rollout.collector import as_responses, decode_responses
from lightning_rlhf.rollout.hf import HFSampler
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import SamplingParams
from lightning_rlhf.rollout.score import annotate, predict, score
from lightning_rlhf.stages.policies import Kept, Source
from lightning_rlhf.stages.reward.build_rewards import build_reward, hub_rewards
from lightning_rlhf.stages.reward.reward_fitness import check_formats
from lightning_rlhf.stages.reward.unfit import print_verdicts, verdicts_on
from lightning_rlhf.stages.run import Run
from lightning_rlhf.stages.select import load_weights

Part = tuple[Int[Tensor, " B"], Rollout]
"""Responses, on the CPU, and their numbers among the responses of all processes."""
R = TypeVar("R", Demonstration, Prompt)
E = TypeVar("E")
GREEDY = 1e-6
"""Temperature at which a token whose logit is largest by more than 2e-5 has probability 1."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The prompts and settings that are the same for every policy."""

    ready: Run
    config: ResponsesConfig
    prompts: Sequence[PromptTokens]
    rows: Sequence[dict[str, Any]]
    """Rows of the data that the prompts index."""
    references: Sequence[DemonstrationTokens]
    """Held-out demonstrations; empty where the data have none."""
    sources: Mapping[str, str]
    """Policy -> path of the folder or file that it is loaded from."""
    verdicts: Mapping[str, Verdict]
    """Component of the reward -> verdict of its fitness report, where it has one."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The responses of a policy, and what it predicts for the demonstrations."""

    rollouts: Mapping[Decoding, Sequence[Part]]
    """Responses of each decoding that this process sampled."""
    perplexity: float | None
    """Perplexity of the held-out demonstrations; None without any."""


def told_verdicts(ready: Run) -> dict[str, Verdict]:
    """Print and return the verdicts of fitness reports on the reward, by component.

    To be called after `light_sources`, which downloads reward models.
    """
    found = verdicts_on(ready.settings, {**ready.parents, **hub_rewards(ready)}, refuses=False)
    print_verdicts(found)
    return {name: verdict for name, verdict in found.items() if verdict is not None}


def load_policy(task: Task, policy: Source | None) -> tuple[Roles, str]:
    """Return the models with the policy and the role that is the policy, on the device.

    policy: None is the base model.
    Raises CheckpointError where a checkpoint is damaged or does not fit the model.
    """
    ready, config = task.ready, task.config
    settings = ready.settings
    with Working("loading the model"):
        start = ready.parents.get(SFT) if isinstance(policy, Kept) else policy
        roles = start_from(settings.model, start, trainable=False, seed=settings.seed)
        if isinstance(policy, Kept):
            roles.add_adapter(POLICY, policy.lora(), settings.seed)
            load_weights(roles, policy.path, policy.origin(), prefix="roles.")
    check_vocabulary(roles, ready.tokenizer)
    longest = max(len(example.prompt) for example in task.prompts)
    check_positions(
        roles, longest + config.max_response_tokens,
        f"the longest prompt ({longest} tokens) with {settings.stage}.max_response_tokens "
        f"({config.max_response_tokens})",
        lower=f"lower {settings.stage}.max_response_tokens or data.max_prompt_tokens, to {{limit}} "
        "together",
    )  # fmt: skip
    check_room(
        roles, config.batch_size, longest,
        config.max_response_tokens, f"{settings.stage}.max_response_tokens", ready.device,
    )  # fmt: skip
    return roles.to(ready.device), POLICY if isinstance(policy, Kept) else REFERENCE


def fitting(ready: Run, rows: Rows[Any], limit: int | None) -> Sequence[Any]:
    """Return at most `limit` of the rows that fit, drawn with the seed, as tokens.

    Raises DataError where none fits.
    """
    fits = tokenise(rows, ready.chat, ready.settings.data)
    place = {number: i for i, number in enumerate(rows.numbers)}
    usable = rows.only([place[number] for number in fits.numbers])
    kept = set(sample(usable, limit, ready.settings.seed).numbers)
    pairs = zip(fits.examples, fits.numbers, strict=True)
    return [example for example, number in pairs if number in kept]


def free() -> None:
    """Return the memory of models that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.no_grad()
def answer(task: Task, name: str, roles: Roles, role: str) -> Answers:
    """Return the responses of a policy, and its perplexity of the demonstrations."""
    config = task.config
    decodings: dict[Decoding, tuple[float, int]] = {
        "sampled": (config.temperature, config.samples_per_prompt),
        "greedy": (GREEDY, 1),
    }
    return Answers(
        rollouts={
            decoding: sample_responses(task, name, roles, role, temperature, count)
            for decoding, (temperature, count) in decodings.items()
        },
        perplexity=perplexity(loss(task, roles, role)) if task.references else None,
    )


@torch.no_grad()
def sample_responses(
    task: Task, name: str, roles: Roles, role: str, temperature: float, count: int
) -> list[Part]:
    """Return batches of `count` responses of a policy to each prompt, those of this process.

    name: name of the policy in messages; role: role that is the policy.
    Raises LogitsError where it cannot be sampled from; TrainingError where the memory runs out.
    """
    batches = deal(
        batches_of(task, count), task.ready.replicas, divides=issubclass(kind(roles), NativeSampler)
    )
    with roles.use_role(role), Working(f"sampling from {name}", count_mine(batches)) as work:
        try:
            found = responses(task, roles, temperature, batches)
            return list(work.track(found, lambda part: len(part[1])))
        except LogitsError as error:
            raise LogitsError(f"policy {name}") from error
        except torch.OutOfMemoryError as error:
            key = f"{task.ready.settings.stage}.batch_size"
            raise TrainingError(
                f"{key} is {task.config.batch_size}: so many responses at once are too much for "
                f"the memory of the device; allowed: a smaller {key}: {error}"
            ) from error


def numbers_of(parts: Sequence[Part]) -> Int[Tensor, " M"]:
    """Return the numbers of all responses of some parts."""
    return torch.cat([torch.arange(0), *(numbers for numbers, _ in parts)])


def kind(roles: Roles) -> type[NativeSampler | HFSampler]:
    """Return the sampler of a model."""
    return NativeSampler if roles.caches else HFSampler


def batches_of(task: Task, count: int) -> Iterator[tuple[Prompts, int]]:
    """Yield batches of prompts, each with a number of responses, of `count` to each prompt."""
    config = task.config
    size = max(1, config.batch_size // count)
    for start in range(0, len(task.prompts), size):
        some = task.prompts[start : start + size]
        prompts = collate_prompts(some, task.ready.chat.pad_token_id)
        for made in range(0, count, config.batch_size):
            yield prompts, min(config.batch_size, count - made)


def responses(
    task: Task, roles: Roles, temperature: float, batches: Sequence[DealtBatch]
) -> Iterator[Part]:
    """Yield the responses of the active role that this process samples.

    The random numbers depend on the seed alone. Log-probabilities are those at
    `config.temperature`, whatever the temperature of sampling.
    """
    config, ready = task.config, task.ready
    params = SamplingParams(
        max_response_tokens=config.max_response_tokens,
        temperature=temperature,
        end_token_ids=ready.chat.end_token_ids,
        stop=ready.chat.stop_at(config.stop_strings),
    )
    sampler = kind(roles)(roles, params)
    generator = torch.Generator().manual_seed(ready.settings.seed)
    rows = MicrobatchSize(f"{ready.settings.stage}.batch_size", config.batch_size)
    for numbers, sampled in sample_mine(sampler, batches, generator):
        rollout = annotate(
            sampled,
            roles,
            None,
            is_exact=sampler.is_exact and temperature == config.temperature,
            temperature=config.temperature,
            policy_rows=rows,
            batch_size=config.batch_size,
        )
        yield numbers, rollout.to("cpu")


@torch.no_grad()
def loss(task: Task, roles: Roles, role: str) -> float:
    """Return a role's mean loss over the response tokens of the demonstrations, in nats.

    - sum over responses and their tokens of log p(token) / number of those tokens

    Each process computes some batches of demonstrations.
    """
    replicas, found = task.ready.replicas, []
    rows = MicrobatchSize(f"{task.ready.settings.stage}.batch_size", task.config.batch_size)
    starts = torch.arange(0, len(task.references), task.config.batch_size)[replicas.rows]
    for start in starts.tolist():
        some = task.references[start : start + task.config.batch_size]
        batch = as_responses(
            [e.prompt for e in some], [e.response for e in some], task.ready.chat.pad_token_id
        ).to(task.ready.device)
        with roles.use_role(role):
            logprobs, _ = rows.fitting(partial(predict, batch, roles, None, 1.0))
        found.append((float(logprobs.cpu().double().sum()), int(batch.response_mask.sum())))
    sums, tokens = zip(*replicas.merged(starts, found), strict=True)
    return -sum(sums) / sum(tokens)


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """The reward, the SFT model as the reference, and the judge."""

    task: Task
    roles: Roles
    """Models on the device, whose reference is the SFT model."""
    reward: Reward
    judge: Judge | None
    microbatch: MicrobatchSize
    """Number of responses that the models read at a time."""

    @classmethod
    def load(cls, task: Task, light: Mapping[str, Any], judge: Judge | None) -> Scorer:
        """Load the SFT model and the reward.

        light: checked components of the reward, as `light_sources` returns them.
        """
        settings = task.ready.settings
        roles, _ = load_policy(task, task.ready.parents.get(SFT))
        microbatch = MicrobatchSize(f"{settings.stage}.batch_size", task.config.batch_size)
        reward = build_reward(task.ready, roles, light, microbatch)
        roles.to(task.ready.device)
        check_formats(task.ready, reward)
        return cls(task=task, roles=roles, reward=reward, judge=judge, microbatch=microbatch)

    def samples(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """Yield one sample a response that this process sampled, as `evaluated` returns them."""
        ready = self.task.ready
        names = [term.name for term in self.reward.terms]
        for _, rollout in parts:
            decoded = decode_responses(rollout.to(ready.device), self.task.rows, ready.chat)
            scores = score(
                self.roles,
                decoded,
                self.reward,
                temperature=self.task.config.temperature,
                batch_size=self.microbatch.rows,
                over_vocabulary=False,
            )
            result = EvaluationResult(rollout=rollout, decoded=decoded, scores=scores.to("cpu"))
            yield from judged_samples(result, names, self.judge)
