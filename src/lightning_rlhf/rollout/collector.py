"""Responses: of the configured sampler, sampled in shards, given as text; annotated and scored."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_rlhf.core import masking, memory, records
from lightning_rlhf.core.errors import CheckpointError, ConfigError, RewardError, RLHFError, require
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.batches import pad
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.rows import Message
from lightning_rlhf.io.user_code import FAULTS, load_object
from lightning_rlhf.models.config import REFERENCE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.parallel.replicas import ONE, Replicas
from lightning_rlhf.rewards.weighted import Reward, Source, checked
from lightning_rlhf.rollout import native, server
from lightning_rlhf.rollout import sampler as samplers
from lightning_rlhf.rollout.score import Critic, annotate, score

OURS = ("native", "hf", "vllm")
"""Names of the package's samplers; any other name is that of a user's class."""


def build_sampler(
    name: str,
    roles: Roles,
    params: samplers.SamplingParams,
    critic: Critic | None,
    key: str = samplers.KEY,
) -> samplers.Sampler:
    """Return the sampler of that name; a user's is wrapped in a `CheckedSampler`.

    key: configuration key that holds the name, for the errors.

    Raises: ConfigError where it does not fit the model, or does not name a sampler.
    """
    if name == "native":
        kind = roles.causal_lm.config.model_type
        caches = roles.cache_argument is not None
        require(caches, key, name, f"hf, for {kind}, which takes no cache")
        on_trunk = critic is not None and critic.shares_trunk
        return native.NativeSampler(roles, params, critic.head if critic and on_trunk else None)
    if name == "hf":
        return samplers.HFSampler(roles, params)
    require(name != "vllm", key, name, "the argument `sampler` too, a ServerSampler")
    own = load_sampler(name, key)
    try:
        sampler = own(roles, params)
    except FAULTS as error:
        if isinstance(error, RLHFError):
            raise
        raise ConfigError(f"{key} is {name!r}, which cannot be built: {error!r}") from error
    longest, vocabulary = params.max_response_tokens, roles.vocab_size
    return samplers.CheckedSampler(sampler, name, longest, vocabulary, key)


def load_sampler(name: str, key: str = samplers.KEY) -> Any:
    """Return the class that `path/to/file.py:Class` or `package.module:Class` names.

    Raises: ConfigError where it does not name a class with the members of `Sampler`.
    """
    found = load_object(name, key, "class", lambda one: isinstance(one, type))
    missing = [part for part in ("sample", "is_exact") if not hasattr(found, part)]
    if missing:
        raise ConfigError(
            f"{key} is {name!r}, which has no {' and no '.join(missing)}; allowed: a class "
            "with both, see lightning_rlhf.rollout.sampler.Sampler"
        )
    try:
        signature(found.sample).bind("self", "prompts", 1, "generator", "share")
    except TypeError as error:
        raise ConfigError(
            f"{key} is {name!r}, whose sample() cannot be given a share of a batch ({error}); "
            "allowed: sample(prompts, samples_per_prompt, generator, share)"
        ) from error
    return found


AT_ONCE = 256
"""Number of texts that are encoded at once; each source splits them into smaller batches."""


def decode_responses(
    rollout: records.SampledResponses, rows: Sequence[Mapping[str, Any]], chat: ChatFormat
) -> records.DecodedResponses:
    """Return the responses of a rollout as text, with the data rows of their prompts."""
    prompt_rows = [rows[index] for index in rollout.index.tolist()]
    tokens = masking.real_tokens(rollout.responses, rollout.response_mask)
    texts = [chat.decode_response(response) for response in tokens]
    return records.DecodedResponses(
        rollout=rollout, rows=prompt_rows, responses=texts, decode=chat.decode_response
    )


def encode_responses(
    rows: Sequence[Mapping[str, Any]], responses: Sequence[str], chat: ChatFormat
) -> records.DecodedResponses:
    """Return texts as responses of the policy: left-padded prompts, an end token after each."""
    prompts = [chat.prompt_tokens(tuple(map(Message.of, row["messages"]))) for row in rows]
    encoded = [chat.response_tokens(text) for text in responses]
    rollout = as_responses(prompts, encoded, chat.pad_token_id)
    return records.DecodedResponses(
        rollout=rollout, rows=rows, responses=responses, decode=chat.decode_response
    )


def as_responses(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int
) -> records.SampledResponses:
    """Return given responses, as tokens with their end tokens, in the form of sampled ones."""
    prompt, prompt_mask = pad(prompts, pad_id, "left")
    response, response_mask = pad(responses, pad_id, "right")
    return records.SampledResponses(
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
        decoded = replace(decoded, rollout=decoded.rollout.to(device))
        parts.append(checked(source(decoded), decoded, name)[0].cpu())
    return torch.cat(parts)


@dataclass(frozen=True)
class ShardedBatch:
    """A whole batch of prompts, of which this process samples some."""

    prompts: records.Prompts
    samples_per_prompt: int
    rows: Int[Tensor, " M"]
    """Numbers of the prompts that this process samples; it may have none."""
    numbers: Int[Tensor, " R"]
    """Numbers, among the responses of all batches, of those that this process samples."""


def shard(
    batches: Iterable[tuple[records.Prompts, int]], replicas: Replicas, *, divides: bool
) -> list[ShardedBatch]:
    """Return all batches (prompts, samples_per_prompt) with the prompts that this process samples.

    Each process takes every `replicas.size`-th batch. The last ones, fewer than the processes, are
    divided among all of them where `divides`.
    """
    pairs = list(batches)
    whole = len(pairs) - len(pairs) % replicas.size if divides else len(pairs)
    found, first = [], 0
    for number, (prompts, count) in enumerate(pairs):
        rows = torch.arange(len(prompts) if number % replicas.size == replicas.rank else 0)
        if number >= whole:
            rows = replicas.share(masking.by_length(prompts.mask))
        numbers = first + samplers.response_numbers(rows, count)
        found.append(ShardedBatch(prompts, count, rows, numbers))
        first += len(prompts) * count
    return found


def sample_local(
    sampler: native.NativeSampler | samplers.HFSampler | server.ServerSampler,
    batches: Iterable[ShardedBatch],
    generator: torch.Generator,
) -> Iterator[tuple[Int[Tensor, " R"], records.SampledResponses]]:
    """Yield the numbers of the responses that this process samples, with them, batch by batch.

    The random numbers of a response are those that it has in a single process.
    """
    for batch in batches:
        prompts, count, rows = batch.prompts, batch.samples_per_prompt, batch.rows
        if not len(rows):
            sampler.draw(len(prompts) * count, generator)
            continue
        prompts = prompts.to(sampler.roles.device)
        yield batch.numbers, sampler.sample(prompts, count, generator, rows)


def sample_reference(
    roles: Roles,
    batches: Iterable[ShardedBatch],
    params: samplers.SamplingParams,
    generator: torch.Generator,
    replicas: Replicas = ONE,
    role: str = REFERENCE,
) -> list[records.SampledResponses]:
    """Return the batches of responses of the SFT model that all processes sample, on the CPU.

    batches: batches of prompts, none of which is divided; role: role of the SFT model.
    Call it before a reward model is trained: full fine-tuning changes the SFT model's weights.
    """
    sampler = (native.NativeSampler if roles.cache_argument else samplers.HFSampler)(roles, params)
    with roles.use_role(role):
        drawn = sample_local(sampler, batches, generator)
        local = [(int(numbers[0]), sampled.to("cpu")) for numbers, sampled in drawn]
    firsts = torch.tensor([first for first, _ in local])
    return replicas.merged(firsts, [part for _, part in local])


def whole_groups(batch: records.Responses, replicas: Replicas) -> Int[Tensor, " M"]:
    """Return the numbers of the responses that this process scores, ascending.

    Neighbours that respond to one prompt are scored in one process, as a reward may compare them.
    The groups are dealt out from the one of the fewest tokens to the longest.
    """
    _, group, counts = batch.index.unique_consecutive(return_inverse=True, return_counts=True)
    tokens = torch.zeros_like(counts).index_add(0, group, batch.mask.sum(dim=1))
    local = replicas.share(tokens.argsort(stable=True))
    return torch.isin(group, local).nonzero().squeeze(1)


def reward_moments(rewards: Float[Tensor, " B"]) -> tuple[float, float]:
    """Return mean and standard deviation of a reward.

    Raises CheckpointError where the deviation is 0 or not finite.
    """
    std, mean = torch.std_mean(rewards)
    if not (std.isfinite() and std > 0):
        raise CheckpointError(
            f"the reward model gives SFT samples rewards of mean {mean} and standard deviation "
            f"{std}, which cannot be standardised; a smaller rm.lr or better pairs may help"
        )
    return float(mean), float(std)


@dataclass(kw_only=True, eq=False)
class Collector:
    """Samples responses of the active role, and has models and reward read them.

    Forward passes take as many rows as fit into memory; a size that was halved stays so.
    """

    roles: Roles
    reward: Reward
    config: PPOConfig
    critic: Critic | None
    chat: ChatFormat
    prompts: Mapping[str, Sequence[dict[str, Any]]]
    """Split -> rows of the data, as for `PPOModule`."""
    microbatch: memory.MicrobatchSize
    """Number of rows that a critic apart, reward and reference read at a time."""
    sampler: Any
    """`Sampler` of the responses; None builds the one that `config.rollout` names."""
    stage: str = "ppo"
    replicas: Replicas = ONE

    def __post_init__(self) -> None:
        config = self.config
        key, size = f"{self.stage}.generation_batch_size", config.generation_batch_size
        self.generation_rows = memory.MicrobatchSize(key, size or config.rollout_batch_size)
        """Number of responses that are sampled at a time."""
        params = samplers.SamplingParams.of(config, self.chat)
        self.sampler = self.sampler or build_sampler(
            config.rollout, self.roles, params, self.critic, key=f"{self.stage}.rollout"
        )
        at_a_time = "the number of rows annotated at a time"
        all_rows = memory.MicrobatchSize(at_a_time, config.rollout_batch_size)
        is_served = isinstance(self.sampler, server.ServerSampler)  # all of whose rows are read
        self.annotation_rows = self.microbatch if is_served else all_rows
        """Number of rows that the policy reads at a time, for a sampler without its numbers."""
        self.annotated = not isinstance(self.sampler, native.NativeSampler)
        """True if the policy read the latest responses for log-probabilities or values."""

    def roll_out(
        self,
        prompts: records.Prompts,
        generator: torch.Generator,
        samples_per_prompt: int = 1,
        version: int = 0,
    ) -> records.Rollout:
        """Return responses of the active role, with its log-probabilities and the values.

        Each process samples and annotates its share of the prompts. Where the memory runs out,
        fewer are sampled at a time. Raises LogitsError, TrainingError or SamplerError.

        version: number of changes of the role's weights so far, for `Sampler.sync`.
        """
        samplers.synchronise(self.sampler, version)
        rows = self.replicas.share(masking.by_length(prompts.mask))
        found = self.replicas.joined(
            samplers.response_numbers(rows, samples_per_prompt),
            lambda _: self.annotate(self.sample(prompts, rows, generator, samples_per_prompt)),
        )
        if isinstance(self.sampler, server.ServerSampler):
            self.sampler.check_gap(found)
        return found

    def greedy(
        self, rollout: records.Rollout, generator: torch.Generator, version: int
    ) -> records.Rollout:
        """Return the greedy response to each prompt of a rollout, for a sampler of the package.

        version: as for `roll_out`. The log-probabilities are those at the lowest temperature.
        """
        one = slice(None, None, self.config.samples_per_prompt)
        width = rollout.tokens.shape[1] - rollout.response_mask.shape[1]
        prompts = records.Prompts(
            tokens=rollout.tokens[one, :width],
            mask=rollout.mask[one, :width],
            index=rollout.index[one],
        )
        params = replace(self.sampler.params, temperature=samplers.GREEDY)
        cold = replace(self, sampler=replace(self.sampler, params=params))
        return cold.roll_out(prompts, generator, version=version)

    def sample(
        self,
        prompts: records.Prompts,
        rows: Int[Tensor, " M"],
        generator: torch.Generator,
        samples_per_prompt: int,
    ) -> records.SampledResponses:
        """Return the responses to some of the prompts, as many at a time as fit into memory."""
        start = generator.get_state()

        def at_a_time(count: int) -> list[records.SampledResponses]:
            parts = []
            for share in rows.split(max(1, count // samples_per_prompt)):
                generator.set_state(start)
                parts.append(self.sampler.sample(prompts, samples_per_prompt, generator, share))
            return parts

        return records.SampledResponses.joined(self.generation_rows.fitting(at_a_time))

    def annotate(self, sampled: records.SampledResponses) -> records.Rollout:
        """Return the responses with the predictions that the sampler does not know."""
        on_trunk = self.critic is not None and self.critic.shares_trunk
        given = [sampled.logprobs, *([sampled.values] if on_trunk else [])]
        is_exact = self.sampler.is_exact
        self.annotated = not is_exact or any(numbers is None for numbers in given)

        def read(rows: int) -> records.Rollout:
            return annotate(
                sampled, self.roles, self.critic, is_exact=is_exact, batch_size=rows,
                temperature=self.config.temperature, policy_rows=self.annotation_rows,
            )  # fmt: skip

        return self.microbatch.fitting(read)

    def decode(self, rollout: records.Rollout, split: str) -> records.DecodedResponses:
        """Return the rollout with its text and the rows of `split` that hold its prompts."""
        return decode_responses(rollout, self.prompts[split], self.chat)

    def score(self, decoded: records.DecodedResponses) -> records.Scores:
        """Return the scores of the reward and of the reference; each process scores its share.

        Raises: RewardError where the reward gives no number for a response, or one in parts that a
            clip would have to bound.
        """
        config = self.config
        is_full = config.kl_estimator == "full" and config.kl_in == "reward"
        read = partial(score, temperature=config.temperature, over_vocabulary=is_full)

        def scored(some: Int[Tensor, " R"]) -> records.Scores:
            given = self.roles, decoded.select(some), self.reward
            return self.microbatch.fitting(lambda rows: read(*given, batch_size=rows))

        found = self.replicas.joined(whole_groups(decoded.rollout, self.replicas), scored)
        assert found.token_scores is not None
        for term, parts in zip(self.reward.terms, found.token_scores.unbind(dim=1), strict=True):
            clip = config.score_clip if term.clip is None else term.clip
            if clip is not None and parts.any():
                given = (
                    f"reward {term.name!r} gave parts of a score, and the score is to be clipped"
                )
                allowed = f"null for clip of the reward and for {self.stage}.score_clip"
                raise RewardError(f"{given} at {clip:g}, which bounds no part; allowed: {allowed}")
        return found
