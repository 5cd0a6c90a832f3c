"""Construction of the configured sampler for each process, and the scale of a reward model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_rlhf.core.errors import CheckpointError, ConfigError, RLHFError, require
from lightning_rlhf.core.masking import by_length
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.io.user_code import FAULTS, load_class
from lightning_rlhf.models.config import REFERENCE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.parallel.replicas import ONE, Replicas
from lightning_rlhf.rollout.hf import HFSampler
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import KEY, CheckedSampler, Sampler, SamplingParams, Share
from lightning_rlhf.rollout.score import Critic

OURS = ("native", "hf")
"""Names of the package's samplers; any other name is that of a user's class."""


def build_sampler(
    name: str, roles: Roles, params: SamplingParams, critic: Critic | None, key: str = KEY
) -> Sampler:
    """Return the sampler of that name; a user's is wrapped in a `CheckedSampler`.

    key: configuration key that holds the name, for the errors.

    Raises: ConfigError where it does not fit the model, or does not name a sampler.
    """
    if name == "native":
        require(roles.caches, key, name,
                f"hf, for {roles.causal_lm.config.model_type}, which takes no cache")  # fmt: skip
        on_trunk = critic is not None and critic.shares_trunk
        return NativeSampler(roles, params, critic.head if critic and on_trunk else None)
    if name == "hf":
        return HFSampler(roles, params)
    try:
        return CheckedSampler(
            load_sampler(name, key)(roles, params),
            name,
            max_response_tokens=params.max_response_tokens,
            vocab_size=roles.vocab_size,
            key=key,
        )
    except FAULTS as error:
        if isinstance(error, RLHFError):
            raise
        raise ConfigError(f"{key} is {name!r}, which cannot be built: {error!r}") from error


def load_sampler(name: str, key: str = KEY) -> Any:
    """Return the class that `path/to/file.py:Class` or `package.module:Class` names.

    Raises: ConfigError where it does not name a class with the members of `Sampler`.
    """
    found = load_class(name, key)
    missing = [part for part in ("sample", "is_exact") if not hasattr(found, part)]
    if missing:
        raise ConfigError(
            f"{key} is {name!r}, which has no {' and no '.join(missing)}; allowed: a class "
            "with both, see lightning_rlhf.rollout.sampler.Sampler"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class DealtBatch:
    """A batch of prompts, of which this process samples some."""

    prompts: Prompts
    """The whole batch."""
    samples_per_prompt: int
    mine: Int[Tensor, " M"]
    """Rows of the prompts that this process samples; empty where it samples none."""
    first: int
    """Number of the first response of the batch among the responses of all batches."""

    @property
    def share(self) -> Share:
        """Return the place of this process's prompts in the batch."""
        return Share(self.mine, len(self.prompts))

    @property
    def numbers(self) -> Int[Tensor, " R"]:
        """Return the numbers, among the responses of all batches, of those sampled here."""
        return self.first + self.share.responses(self.samples_per_prompt)


def deal(
    batches: Iterable[tuple[Prompts, int]], replicas: Replicas, *, divides: bool
) -> list[DealtBatch]:
    """Return all batches, each with the prompts that this process samples.

    Each process takes every `replicas.size`-th batch. The last ones, fewer than the processes, are
    divided among all of them where `divides`.

    batches: pairs (prompts, samples_per_prompt).
    """
    pairs = list(batches)
    whole = len(pairs) - len(pairs) % replicas.size if divides else len(pairs)
    found, first = [], 0
    for number, (prompts, count) in enumerate(pairs):
        mine = torch.arange(len(prompts) if number % replicas.size == replicas.rank else 0)
        if number >= whole:
            mine = replicas.share(by_length(prompts.mask))
        found.append(DealtBatch(prompts=prompts, samples_per_prompt=count, mine=mine, first=first))
        first += len(prompts) * count
    return found


def count_mine(batches: Sequence[DealtBatch]) -> int:
    """Return the number of responses that this process samples."""
    return sum(len(batch.mine) * batch.samples_per_prompt for batch in batches)


def sample_mine(
    sampler: NativeSampler | HFSampler, batches: Iterable[DealtBatch], generator: torch.Generator
) -> Iterator[tuple[Int[Tensor, " R"], SampledResponses]]:
    """Yield the numbers of the responses that this process samples, with them, batch by batch.

    The random numbers of a response are those that it has in a single process.
    """
    for batch in batches:
        prompts, count = batch.prompts, batch.samples_per_prompt
        if not len(batch.mine):
            sampler.draw(len(prompts) * count, generator)
            continue
        some = prompts.select(batch.mine).to(sampler.roles.device)
        if len(some) == len(prompts):
            yield batch.numbers, sampler.sample(some, count, generator)
        else:
            assert isinstance(sampler, NativeSampler)
            yield batch.numbers, sampler.sample(some, count, generator, batch.share)


def sample_reference(
    roles: Roles,
    batches: Iterable[DealtBatch],
    params: SamplingParams,
    generator: torch.Generator,
    replicas: Replicas = ONE,
    role: str = REFERENCE,
) -> list[SampledResponses]:
    """Return the batches of responses of the SFT model that all processes sample, on the CPU.

    batches: batches of prompts, none of which is divided; role: role of the SFT model.
    Call it before a reward model is trained: full fine-tuning changes the SFT model's weights.
    """
    sampler = (NativeSampler if roles.caches else HFSampler)(roles, params)
    with roles.use_role(role):
        mine = [
            (int(numbers[0]), sampled.to("cpu"))
            for numbers, sampled in sample_mine(sampler, batches, generator)
        ]
    return replicas.merged(torch.tensor([first for first, _ in mine]), [part for _, part in mine])


@torch.no_grad()
def sample_rewards(roles: Roles, rollouts: Iterable[SampledResponses]) -> Float[Tensor, " B"]:
    """Return the raw reward of each response, on the CPU."""
    rewards = [
        roles.reward(rollout.tokens.to(roles.device), rollout.mask.to(roles.device)).cpu()
        for rollout in rollouts
    ]
    return torch.cat(rewards)


def reward_moments(rewards: Float[Tensor, " B"]) -> tuple[float, float]:
    """Return mean and standard deviation, by which a reward is standardised.

    Raises CheckpointError where the deviation is 0 or not finite.
    """
    std, mean = torch.std_mean(rewards)
    if not (std.isfinite() and std > 0):
        raise CheckpointError(
            f"the reward model gives SFT samples rewards of mean {mean} and standard deviation "
            f"{std}, which cannot be standardised; a smaller rm.lr or better pairs may help"
        )
    return float(mean), float(std)
