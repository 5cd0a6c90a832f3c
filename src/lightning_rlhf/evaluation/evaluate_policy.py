"""stage=eval_policy: policies against each other and against the SFT model, on held-out prompts."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from lightning_rlhf.callbacks.metrics import perplexity
from lightning_rlhf.core.config import PolicyEvalConfig, ResponsesConfig
from lightning_rlhf.core.errors import LogitsError, TrainingError
from lightning_rlhf.core.kl import best_of_kl_bound
from lightning_rlhf.core.memory import MicrobatchSize
from lightning_rlhf.core.metrics import HELD_OUT
from lightning_rlhf.core.records import Prompts, Rollout
from lightning_rlhf.core.results import EvaluationResult
from lightning_rlhf.data.batches import collate_prompts
from lightning_rlhf.data.lengths import DemonstrationTokens, PromptTokens, tokenise
from lightning_rlhf.data.readers import draw_rows, load
from lightning_rlhf.data.rows import Rows
from lightning_rlhf.evaluation.build_rewards import (
    build_reward,
    for_columns,
    light_sources,
    verdicts_on,
)
from lightning_rlhf.evaluation.evaluate_reward import check_formats, leave_final
from lightning_rlhf.evaluation.policies import (
    KEY,
    Source,
    check_policy,
    find_policies,
    load_policy,
    other_decoding,
    other_sft,
)
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.models.build_roles import check_positions, check_room
from lightning_rlhf.models.checkpoint import Final, Verdict
from lightning_rlhf.models.config import REFERENCE, SFT
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.report.comparison import (
    DECODINGS,
    Comparison,
    Decoding,
    PolicySamples,
    best_of,
    compare_all,
    passes,
)
from lightning_rlhf.report.evaluation_page import (
    NUMBERS,
    PAGE,
    console_tables,
    logged_tables,
    write_evaluation,
)
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.collector import as_responses, decode_responses, sample_local, shard
from lightning_rlhf.rollout.hf import HFSampler
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import SamplingParams
from lightning_rlhf.rollout.score import annotate, predict, score
from lightning_rlhf.runs.console import note_on_few
from lightning_rlhf.runs.folders import FINAL, run_name
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.stage import Settings, Stage

Part = tuple[Int[Tensor, " B"], Rollout]
"""Responses, on the CPU, and their numbers among the responses of all processes."""
Answers = tuple[dict[Decoding, list[Part]], float | None]
"""Responses by decoding, those of this process, and the perplexity of the demonstrations."""


GREEDY = 1e-6
"""Temperature at which a token whose logit is largest by more than 2e-5 has probability 1."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The prompts and settings that are the same for every policy."""

    run: Run
    config: ResponsesConfig
    batch: MicrobatchSize
    """Number of responses that the models read at a time."""
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
        run: Run,
        part: Literal["train", "val"],
        limit: int | None,
        *,
        reads_demonstrations: bool = False,
    ) -> Task:
        """Read the data and print the verdicts on the reward.

        part: prompts to respond to; limit: largest number of them, drawn with the seed.
        """
        settings, references = run.settings, None
        judge = load_judge(settings.data.judge) if settings.data.judge else None
        light = light_sources(run)
        verdicts = verdicts_on(run, refuses=False)
        with Working("reading the data"):
            rows = getattr(load("prompts", settings.data, settings.seed), part)
            if reads_demonstrations and settings.data.demonstrations.train is not None:
                references = load("demonstrations", settings.data, settings.seed).val
        light = for_columns(light, {name for row in rows.rows for name in row.columns})
        prompts = fitting_tokens(run, rows, limit)
        return cls(
            run=run,
            config=settings.config,
            batch=MicrobatchSize(f"{settings.stage}.batch_size", settings.config.batch_size),
            prompts=prompts,
            rows=[row.columns for row in rows.rows],
            references=() if references is None else fitting_tokens(run, references, limit),
            light=light,
            judge=judge,
            verdicts=verdicts,
        )

    def load(self, policy: Source | None) -> tuple[Roles, str]:
        """Return the models, on the device, and the role that is the policy; as `load_policy`."""
        roles, role = load_policy(self.run, policy)
        longest = max(len(example.prompt) for example in self.prompts)
        response, size = self.config.max_response_tokens, self.config.batch_size
        key = f"{self.run.settings.stage}.max_response_tokens"
        what = f"the longest prompt ({longest} tokens) with {key} ({response})"
        lower = f"lower {key} or data.max_prompt_tokens, to {{limit}} together"
        check_positions(roles, longest + response, what, lower)
        check_room(roles, size, longest, response, key, self.run.device)
        return roles.to(self.run.device), role

    def answers_of(
        self,
        name: str,
        policy: Source | None,
        decodings: Mapping[Decoding, tuple[float, int]],
    ) -> Answers:
        """Load a policy, return its `answers`, and free its memory."""
        found = self.answers(name, *self.load(policy), decodings)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return found

    def answers(
        self, name: str, roles: Roles, role: str, decodings: Mapping[Decoding, tuple[float, int]]
    ) -> Answers:
        """Return the responses of a policy, and the perplexity, None without demonstrations.

        name: name of the policy in messages; role: role that is the policy.
        decodings: decoding -> temperature and number of responses to each prompt.
        """
        found = {
            decoding: self.sample(name, roles, role, temperature, count)
            for decoding, (temperature, count) in decodings.items()
        }
        return found, perplexity(self.loss(roles, role)) if self.references else None

    @torch.no_grad()
    def sample(
        self, name: str, roles: Roles, role: str, temperature: float, count: int
    ) -> list[Part]:
        """Return batches of `count` responses of a policy to each prompt, those of this process.

        The random numbers depend on the seed alone. Log-probabilities are those at
        `config.temperature`, whatever the temperature of sampling.

        Raises LogitsError where it cannot be sampled from; TrainingError where the memory runs out.
        """
        config, run, key = self.config, self.run, self.batch.key
        kind = NativeSampler if roles.caches else HFSampler
        batches = shard(self.batches(count), run.replicas, divides=kind is NativeSampler)
        params = SamplingParams(
            max_response_tokens=config.max_response_tokens,
            temperature=temperature,
            end_token_ids=run.chat.end_token_ids,
            stop=run.chat.stop_at(config.stop_strings),
        )
        sampler = kind(roles, params)
        generator = torch.Generator().manual_seed(run.settings.seed)

        def parts() -> Iterator[Part]:
            for numbers, sampled in sample_local(sampler, batches, generator):
                rollout = annotate(
                    sampled,
                    roles,
                    None,
                    is_exact=sampler.is_exact and temperature == config.temperature,
                    temperature=config.temperature,
                    policy_rows=self.batch,
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

    def batches(self, count: int) -> Iterator[tuple[Prompts, int]]:
        """Yield batches of prompts, each with its number of responses, of `count` to a prompt."""
        most = self.config.batch_size
        size = max(1, most // count)
        for start in range(0, len(self.prompts), size):
            some = self.prompts[start : start + size]
            prompts = collate_prompts(some, self.run.chat.pad_token_id)
            for made in range(0, count, most):
                yield prompts, min(most, count - made)

    @torch.no_grad()
    def loss(self, roles: Roles, role: str) -> float:
        """Return a role's mean loss over the response tokens of the demonstrations, in nats.

        - sum over responses and their tokens of log p(token) / number of those tokens

        Each process computes some batches of demonstrations.
        """
        run, size, found = self.run, self.config.batch_size, []
        starts = torch.arange(0, len(self.references), size)[run.replicas.rows]
        for start in starts.tolist():
            some = self.references[start : start + size]
            texts = [e.prompt for e in some], [e.response for e in some]
            batch = as_responses(*texts, run.chat.pad_token_id).to(run.device)
            with roles.use_role(role):
                logprobs, _ = self.batch.fitting(partial(predict, batch, roles, None, 1.0))
            found.append((float(logprobs.cpu().double().sum()), int(batch.response_mask.sum())))
        sums, tokens = zip(*run.replicas.merged(starts, found), strict=True)
        return -sum(sums) / sum(tokens)

    def load_reward(self) -> tuple[Roles, Reward]:
        """Return the SFT model, which is the reference, and the reward."""
        roles, _ = self.load(self.run.parents.get(SFT))
        reward = build_reward(self.run, roles, self.light, self.batch)
        roles.to(self.run.device)
        check_formats(self.run, reward)
        return roles, reward

    def scored(self, roles: Roles, reward: Reward, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Return the `judged_samples` of the responses of all processes.

        roles: models on the device, whose reference is the SFT model.
        """
        run, names = self.run, [term.name for term in reward.terms]

        def samples() -> Iterator[dict[str, Any]]:
            for _, rollout in parts:
                decoded = decode_responses(rollout.to(run.device), self.rows, run.chat)
                scores = score(
                    roles,
                    decoded,
                    reward,
                    temperature=self.config.temperature,
                    batch_size=self.batch.rows,
                    over_vocabulary=False,
                )
                result = EvaluationResult(rollout=rollout, decoded=decoded, scores=scores.to("cpu"))
                yield from judged_samples(result, names, self.judge)

        numbers = torch.cat([torch.arange(0), *(numbers for numbers, _ in parts)])
        with Working("scoring the responses", len(numbers)) as working:
            return run.replicas.merged(numbers, list(working.track(samples())))


def fitting_tokens(run: Run, rows: Rows[Any], limit: int | None) -> Sequence[Any]:
    """Return at most `limit` of the rows that fit, drawn with the seed, as tokens.

    Raises DataError where none fits.
    """
    fits = tokenise(rows, run.chat, run.settings.data)
    place = {number: i for i, number in enumerate(rows.numbers)}
    usable = rows.only([place[number] for number in fits.numbers])
    kept = set(draw_rows(usable, limit, run.settings.seed).numbers)
    pairs = zip(fits.examples, fits.numbers, strict=True)
    return [example for example, number in pairs if number in kept]


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
    numbers = NUMBERS
    divides = True

    def models(self, settings: Settings) -> Mapping[str, Final]:
        found = find_policies(settings)
        return {f"policy {name}": one for name, one in found.items() if isinstance(one, Final)}

    def measure(self, run: Run) -> Path:
        settings, sft = run.settings, run.parents.get(SFT)
        config: PolicyEvalConfig = settings.config
        sources = find_policies(settings)
        for source in sources.values():
            check_policy(source, sft, KEY)
        task = Task.prepare(run, "val", settings.data.max_val_rows, reads_demonstrations=True)
        shown = [
            f"{', '.join(sources)} and the SFT model on {len(task.prompts)} held-out prompts",
            f"{config.samples_per_prompt} sampled responses and a greedy one to each",
            *note_on_few(len(task.prompts), to_validate=True),
        ]
        print_line(", ".join(shown))
        for differing in (other_decoding(settings, sources), other_sft(sources, sft)):
            if differing is not None:
                print_line(differing, "yellow")
        policies = answered(task, sources)
        content = compared(task, sources, policies)
        with leave_final(run, content["metrics"]) as (whole, loggers):
            for table in console_tables(content):
                get_console().print(table)
            for name, (columns, rows) in logged_tables(content, policies).items():
                log_table(loggers, name, columns, rows)
            names = ", ".join(policy.name for policy in policies[1:])
            title = f"{run_name(settings)}: {names} and the SFT model"
            write_evaluation(whole, title, content, policies, config.shown)
        final = run.folder / FINAL
        print_line(f"{settings.stage} finished: {final / PAGE}")
        return final


def answered(task: Task, policies: Mapping[str, Source]) -> list[PolicySamples]:
    """Return the scored responses of the SFT model, then of the policies, then of best-of-n."""
    config: PolicyEvalConfig = task.run.settings.config
    temperature, count, n = config.temperature, config.samples_per_prompt, config.best_of
    ways: dict[Decoding, tuple[float, int]] = {
        "sampled": (temperature, count), "greedy": (GREEDY, 1)
    }  # fmt: skip
    answers = {name: task.answers_of(name, source, ways) for name, source in policies.items()}
    roles, reward = task.load_reward()
    answers = {SFT: task.answers(SFT, roles, REFERENCE, ways), **answers}
    found = []
    for name, (parts, told) in answers.items():
        samples = {d: task.scored(roles, reward, parts[d]) for d in DECODINGS}
        found.append(PolicySamples(name=name, samples=samples, perplexity=told))
    if n is not None:
        name = f"best of {n}"
        more = task.sample(f"{SFT}, {name}", roles, REFERENCE, temperature, n * count)
        best = best_of(task.scored(roles, reward, more), n, count)
        # The greedy responses are those of the SFT model, of which there is one a prompt.
        both = {**found[0].samples, "sampled": best}
        found.append(PolicySamples(name=name, samples=both, perplexity=None, best_of=n))
    return found


def compared(
    task: Task, sources: Mapping[str, Source], policies: Sequence[PolicySamples]
) -> dict[str, Any]:
    """Return the content of evaluation.json: the numbers of all policies and their comparisons.

    Numbers that are not finite are None, and left out of the metrics.
    """
    settings, prompts = task.run.settings, len(task.prompts)
    config: PolicyEvalConfig = settings.config
    ks = (1, config.samples_per_prompt) if config.pass_k is None else config.pass_k
    passed = passes(policies, prompts, ks)
    numbers: dict[str, dict[Decoding, dict[str, float]]] = {}
    for policy in policies:
        sampled, greedy = (evaluation_metrics(policy.samples[d]) for d in DECODINGS)
        del greedy["eval/kl"]
        sampled |= passed[policy.name]
        if policy.perplexity is not None:
            sampled["eval/perplexity"] = policy.perplexity
        if policy.best_of is not None:
            sampled["eval/best_of_kl_bound"] = best_of_kl_bound(policy.best_of)
        numbers[policy.name] = {"sampled": sampled, "greedy": greedy}
    comparisons = compare_all(policies, prompts, settings.seed)
    first = numbers[policies[1].name]["sampled"] | gains(comparisons, policies[1].name)
    return {
        "metrics": {name: x for name, x in first.items() if math.isfinite(x)},
        "prompts": prompts,
        "samples_per_prompt": config.samples_per_prompt,
        "temperature": config.temperature,
        "seed": settings.seed,
        "sources": {name: str(source.path) for name, source in sources.items()},
        "verdicts": task.verdicts,
        "policies": {
            name: {
                d: {n: x if math.isfinite(x) else None for n, x in found.items()}
                for d, found in of.items()
            }
            for name, of in numbers.items()
        },
        "comparisons": [asdict(one) for one in comparisons],
    }


def gains(comparisons: Sequence[Comparison], policy: str) -> dict[str, float]:
    """Return how the rewards of a policy's samples compare with those of the SFT model's."""
    wanted = (policy, SFT, "sampled", "reward")
    (one,) = (x for x in comparisons if (x.policy, x.other, x.decoding, x.number) == wanted)
    assert one.win_rate is not None
    found: dict[str, float] = {}
    for name, value, interval in (
        ("eval/reward_gain", one.difference, one.interval),
        ("eval/win_rate", one.win_rate, one.win_interval),
    ):
        found[name] = value
        if interval is not None:
            found[f"{name}_low"], found[f"{name}_high"] = interval
    return found
