"""stage=eval_policy: policies against each other and against the SFT model, on held-out prompts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from rich import get_console
from torch import Tensor

from lightning_rlhf.callbacks.evaluation import (
    Judge,
    evaluation_metrics,
    judged_samples,
    load_judge,
)
from lightning_rlhf.callbacks.loggers import log_table
from lightning_rlhf.core.config import PolicyEvalConfig, ResponsesConfig
from lightning_rlhf.core.errors import LogitsError, TrainingError
from lightning_rlhf.core.kl import best_of_kl_bound
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.metrics import HELD_OUT
from lightning_rlhf.core.records import Prompts, Rollout
from lightning_rlhf.core.results import EvaluationResult
from lightning_rlhf.core.text_metrics import perplexity
from lightning_rlhf.data.batches import collate_prompts
from lightning_rlhf.data.lengths import DemonstrationTokens, PromptTokens, tokenise
from lightning_rlhf.data.readers import draw_rows, load
from lightning_rlhf.data.rows import Rows
from lightning_rlhf.evaluation.build_rewards import build_reward, hub_rewards, light_sources
from lightning_rlhf.evaluation.evaluate_reward import check_formats, leave_final
from lightning_rlhf.evaluation.policies import (
    Kept,
    Source,
    check_policies,
    find_policies,
    other_decoding,
    other_sft,
    policy_folders,
)
from lightning_rlhf.evaluation.select import load_weights
from lightning_rlhf.evaluation.unfit import print_verdicts, verdicts_on
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.models.build_roles import (
    check_positions,
    check_room,
    check_vocabulary,
    start_from,
)
from lightning_rlhf.models.checkpoint import Final, Verdict
from lightning_rlhf.models.config import POLICY, REFERENCE, SFT
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.report.comparison import (
    DECODINGS,
    Decoding,
    PolicySamples,
    Sample,
    best_of,
    compare_all,
    passes,
)
from lightning_rlhf.report.evaluation_page import PAGE, PolicyReport
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.collector import as_responses, decode_responses, sample_local, shard
from lightning_rlhf.rollout.hf import HFSampler
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import SamplingParams
from lightning_rlhf.rollout.score import annotate, predict, score
from lightning_rlhf.runs.console import note_on_few
from lightning_rlhf.runs.folders import run_name
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.stage import Settings, Stage

Part = tuple[Int[Tensor, " B"], Rollout]
"""Responses, on the CPU, and their numbers among the responses of all processes."""
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
    """Held-out demonstrations; empty where the data have none, or they are not wanted."""
    light: Mapping[str, Any]
    """Checked components of the reward."""
    judge: Judge | None
    verdicts: Mapping[str, Verdict]
    """Component of the reward -> verdict of its fitness report, where it has one."""

    @classmethod
    def prepare(
        cls,
        ready: Run,
        part: Literal["train", "val"],
        limit: int | None,
        *,
        reads_demonstrations: bool = False,
    ) -> Task:
        """Read the data and print the verdicts on the reward.

        part: prompts to respond to; limit: largest number of them, drawn with the seed.
        """
        settings = ready.settings
        judge = load_judge(settings.data.judge) if settings.data.judge else None
        with Working("reading the data"):
            rows = getattr(load("prompts", settings.data, settings.seed), part)
            references = None
            if reads_demonstrations and settings.data.demonstrations.train is not None:
                references = load("demonstrations", settings.data, settings.seed).val
        light = light_sources(ready, {name for row in rows.rows for name in row.columns})
        prompts = fitting_tokens(ready, rows, limit)
        found = verdicts_on(settings, {**ready.parents, **hub_rewards(ready)}, refuses=False)
        print_verdicts(found)
        return cls(
            ready=ready,
            config=settings.config,
            prompts=prompts,
            rows=[row.columns for row in rows.rows],
            references=() if references is None else fitting_tokens(ready, references, limit),
            light=light,
            judge=judge,
            verdicts={name: verdict for name, verdict in found.items() if verdict is not None},
        )


def fitting_tokens(ready: Run, rows: Rows[Any], limit: int | None) -> Sequence[Any]:
    """Return at most `limit` of the rows that fit, drawn with the seed, as tokens.

    Raises DataError where none fits.
    """
    fits = tokenise(rows, ready.chat, ready.settings.data)
    place = {number: i for i, number in enumerate(rows.numbers)}
    usable = rows.only([place[number] for number in fits.numbers])
    kept = set(draw_rows(usable, limit, ready.settings.seed).numbers)
    pairs = zip(fits.examples, fits.numbers, strict=True)
    return [example for example, number in pairs if number in kept]


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
    key, response = f"{settings.stage}.max_response_tokens", config.max_response_tokens
    check_positions(
        roles, longest + response, f"the longest prompt ({longest} tokens) with {key} ({response})",
        lower=f"lower {key} or data.max_prompt_tokens, to {{limit}} together",
    )  # fmt: skip
    check_room(roles, config.batch_size, longest, response, key, ready.device)
    return roles.to(ready.device), POLICY if isinstance(policy, Kept) else REFERENCE


def sample_policy(
    task: Task,
    name: str,
    policy: Source | None,
    decodings: Mapping[Decoding, tuple[float, int]],
) -> tuple[dict[Decoding, list[Part]], float | None]:
    """Load a policy, return what `answer` does, and free its memory."""
    roles, role = load_policy(task, policy)
    found = answer(task, name, roles, role, decodings)
    del roles
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


@torch.no_grad()
def answer(
    task: Task, name: str, roles: Roles, role: str, decodings: Mapping[Decoding, tuple[float, int]]
) -> tuple[dict[Decoding, list[Part]], float | None]:
    """Return the responses that this process samples, and the perplexity of the demonstrations.

    name: name of the policy in messages; role: role that is the policy.
    decodings: decoding -> temperature and number of responses to each prompt.
    The perplexity is None without demonstrations.
    """
    found = {
        decoding: sample_responses(task, name, roles, role, temperature, count)
        for decoding, (temperature, count) in decodings.items()
    }
    return found, perplexity(demonstration_loss(task, roles, role)) if task.references else None


@torch.no_grad()
def sample_responses(
    task: Task, name: str, roles: Roles, role: str, temperature: float, count: int
) -> list[Part]:
    """Return batches of `count` responses of a policy to each prompt, those of this process.

    The random numbers depend on the seed alone. Log-probabilities are those at
    `config.temperature`, whatever the temperature of sampling.

    Raises LogitsError where it cannot be sampled from; TrainingError where the memory runs out.
    """
    config, ready = task.config, task.ready
    key = f"{ready.settings.stage}.batch_size"
    kind = NativeSampler if roles.caches else HFSampler
    batches = shard(batches_of(task, count), ready.replicas, divides=kind is NativeSampler)
    params = SamplingParams(
        max_response_tokens=config.max_response_tokens,
        temperature=temperature,
        end_token_ids=ready.chat.end_token_ids,
        stop=ready.chat.stop_at(config.stop_strings),
    )
    sampler = kind(roles, params)
    generator = torch.Generator().manual_seed(ready.settings.seed)
    rows = MicrobatchSize(key, config.batch_size)

    def parts() -> Iterator[Part]:
        for numbers, sampled in sample_local(sampler, batches, generator):
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

    count = sum(len(batch.numbers) for batch in batches)
    with roles.use_role(role), Working(f"sampling from {name}", count) as work:
        try:
            return list(work.track(parts(), lambda part: len(part[1])))
        except LogitsError as error:
            raise LogitsError(f"policy {name}") from error
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"{key} is {config.batch_size}: so many responses at once are too much for "
                f"the memory of the device; allowed: a smaller {key}: {error}"
            ) from error


def batches_of(task: Task, count: int) -> Iterator[tuple[Prompts, int]]:
    """Yield batches of prompts, each with a number of responses, of `count` to each prompt."""
    config = task.config
    size = max(1, config.batch_size // count)
    for start in range(0, len(task.prompts), size):
        some = task.prompts[start : start + size]
        prompts = collate_prompts(some, task.ready.chat.pad_token_id)
        for made in range(0, count, config.batch_size):
            yield prompts, min(config.batch_size, count - made)


@torch.no_grad()
def demonstration_loss(task: Task, roles: Roles, role: str) -> float:
    """Return a role's mean loss over the response tokens of the demonstrations, in nats.

    - sum over responses and their tokens of log p(token) / number of those tokens

    Each process computes some batches of demonstrations.
    """
    replicas, size, found = task.ready.replicas, task.config.batch_size, []
    rows = MicrobatchSize(f"{task.ready.settings.stage}.batch_size", size)
    starts = torch.arange(0, len(task.references), size)[replicas.rows]
    for start in starts.tolist():
        some = task.references[start : start + size]
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
    """The reward, and the SFT model as the reference."""

    task: Task
    roles: Roles
    """Models on the device, whose reference is the SFT model."""
    reward: Reward
    microbatch: MicrobatchSize
    """Number of responses that the models read at a time."""

    @classmethod
    def load(cls, task: Task) -> Scorer:
        """Load the SFT model and the reward."""
        roles, _ = load_policy(task, task.ready.parents.get(SFT))
        key = f"{task.ready.settings.stage}.batch_size"
        microbatch = MicrobatchSize(key, task.config.batch_size)
        reward = build_reward(task.ready, roles, task.light, microbatch)
        roles.to(task.ready.device)
        check_formats(task.ready, reward)
        return cls(task=task, roles=roles, reward=reward, microbatch=microbatch)

    def scored(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Return the `judged_samples` of the responses of all processes."""
        numbers = torch.cat([torch.arange(0), *(numbers for numbers, _ in parts)])
        with Working("scoring the responses", len(numbers)) as working:
            mine = list(working.track(self._samples(parts)))
            return self.task.ready.replicas.merged(numbers, mine)

    def _samples(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
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
            yield from judged_samples(result, names, self.task.judge)


def run_eval_policy(ready: Run) -> Path:
    """Sample and score responses of the SFT model and of all policies; write the tables."""
    settings = ready.settings
    config: PolicyEvalConfig = settings.config
    check_policies(settings, ready.parents)
    policies = find_policies(settings)
    task = Task.prepare(ready, "val", settings.data.max_val_rows, reads_demonstrations=True)
    shown = [
        f"{', '.join(policies)} and the SFT model on {len(task.prompts)} held-out prompts",
        f"{config.samples_per_prompt} sampled responses and a greedy one to each",
        *note_on_few(len(task.prompts), to_validate=True),
    ]
    print_line(", ".join(shown))
    sft = ready.parents.get(SFT)
    for differing in (other_decoding(settings, policies), other_sft(policies, sft)):
        if differing is not None:
            print_line(differing, "yellow")
    found = compared_policies(task, policies)
    if not task.ready.replicas.is_first:
        sys.exit()
    report = policy_report(task, policies, found)
    for table in report.console():
        get_console().print(table)

    def log(loggers: Sequence[Any]) -> None:
        for name, (columns, rows) in report.logged().items():
            log_table(loggers, name, columns, rows, 0)

    final = leave_final(
        task.ready, report.metrics, log, lambda whole: report.write(whole, config.shown)
    )
    print_line(f"{settings.stage} finished: {final / PAGE}")
    return final


def compared_policies(task: Task, policies: Mapping[str, Source]) -> list[PolicySamples]:
    """Return the scored responses of the SFT model, then of the policies, then of best-of-n."""
    config: PolicyEvalConfig = task.ready.settings.config
    temperature, count, n = config.temperature, config.samples_per_prompt, config.best_of
    decodings: dict[Decoding, tuple[float, int]] = {
        "sampled": (temperature, count), "greedy": (GREEDY, 1)
    }  # fmt: skip
    answers = {name: sample_policy(task, name, x, decodings) for name, x in policies.items()}
    scorer = Scorer.load(task)
    answers = {SFT: answer(task, SFT, scorer.roles, REFERENCE, decodings), **answers}
    found = [
        PolicySamples(
            name=name, samples={d: scorer.scored(parts[d]) for d in DECODINGS}, perplexity=told
        )
        for name, (parts, told) in answers.items()
    ]
    if n is not None:
        name = f"best of {n}"
        parts = sample_responses(
            task, f"{SFT}, {name}", scorer.roles, REFERENCE, temperature, n * count
        )
        sampled = best_of(scorer.scored(parts), n, count)
        # The greedy responses are those of the SFT model, of which there is one a prompt.
        both: dict[Decoding, Sequence[Sample]] = {
            "sampled": sampled, "greedy": found[0].samples["greedy"]
        }  # fmt: skip
        found.append(PolicySamples(name=name, samples=both, perplexity=None, best_of=n))
    return found


def policy_report(
    task: Task, sources: Mapping[str, Source], policies: Sequence[PolicySamples]
) -> PolicyReport:
    """Return the numbers of all policies and their comparisons."""
    settings, prompts = task.ready.settings, len(task.prompts)
    config: PolicyEvalConfig = settings.config
    ks = (1, config.samples_per_prompt) if config.pass_k is None else config.pass_k
    passed = passes(policies, prompts, ks)
    numbers: dict[Decoding, dict[str, dict[str, float]]] = {d: {} for d in DECODINGS}
    for policy in policies:
        greedy = evaluation_metrics(policy.samples["greedy"])
        numbers["greedy"][policy.name] = {n: x for n, x in greedy.items() if n != "eval/kl"}
        sampled = evaluation_metrics(policy.samples["sampled"]) | passed[policy.name]
        if policy.perplexity is not None:
            sampled["eval/perplexity"] = policy.perplexity
        if policy.best_of is not None:
            sampled["eval/best_of_kl_bound"] = best_of_kl_bound(policy.best_of)
        numbers["sampled"][policy.name] = sampled
    return PolicyReport(
        title=f"{run_name(settings)}: {', '.join(p.name for p in policies[1:])} and the SFT model",
        about={
            "prompts": prompts,
            "samples_per_prompt": config.samples_per_prompt,
            "temperature": config.temperature,
            "seed": settings.seed,
            "sources": {name: str(policy.path) for name, policy in sources.items()},
            "verdicts": task.verdicts,
        },
        policies=policies,
        numbers=numbers,
        comparisons=compare_all(policies, prompts, settings.seed),
    )


class EvalPolicy(Stage):
    """Tables of sampled and scored responses of all policies."""

    name = "eval_policy"
    title = "Evaluation of policies"
    config = PolicyEvalConfig
    data = "prompts"
    also_reads = ("demonstrations",)
    reads_reward = True
    reads_judge = True
    summary = (HELD_OUT, "eval/reward_gain", "eval/win_rate", "eval/kl", "eval/perplexity")
    hands_over = "report"
    numbers = "evaluation.json"
    divides = True

    def models(self, settings: Settings) -> Mapping[str, Final]:
        return policy_folders(settings)

    def measure(self, run: Run) -> Path:
        return run_eval_policy(run)
