"""The run of stage=eval_policy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from rich import get_console

from lightning_rlhf.callbacks.evaluation import (
    Judge,
    evaluated,
    evaluation_metrics,
    load_judge,
)
from lightning_rlhf.callbacks.loggers import build_loggers, close_loggers, log_table
from lightning_rlhf.callbacks.names import check_names
from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.core.config import PolicyEvalConfig
from lightning_rlhf.core.device_memory import MicrobatchSize
from lightning_rlhf.core.results import EvaluationResult
from lightning_rlhf.core.types import Rollout
from lightning_rlhf.data.lengths import Tokenised, tokenise_demonstrations, tokenise_prompts
from lightning_rlhf.data.readers import Rows
from lightning_rlhf.data.rows import Demonstration, Prompt
from lightning_rlhf.data.splits import load_demonstrations, load_prompts, sample
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.models.roles import REFERENCE, SFT, Roles
from lightning_rlhf.report.comparison import (
    DECODINGS,
    Decoding,
    PolicySamples,
    Sample,
    compare_all,
    passes,
)
from lightning_rlhf.report.evaluation_page import PAGE, PolicyReport
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.decoded import decode_responses
from lightning_rlhf.rollout.score import score
from lightning_rlhf.stages.console import note_on_few, print_line
from lightning_rlhf.stages.folder.folders import FINAL, claim, find_parents, run_name
from lightning_rlhf.stages.launch import Prepared, identity, make_ready
from lightning_rlhf.stages.policies import Source, find_policies, other_decoding
from lightning_rlhf.stages.policy_answers import Answers, Task, answer, load_policy
from lightning_rlhf.stages.reward.build_rewards import build_reward, light_sources
from lightning_rlhf.stages.reward.reward_formats import check_formats
from lightning_rlhf.stages.run_report import leave_report
from lightning_rlhf.stages.stage import Settings

R = TypeVar("R", Demonstration, Prompt)
E = TypeVar("E")


def run_eval_policy(settings: Settings, config: PolicyEvalConfig) -> Path:
    """Sample and score responses of the SFT model and of all policies; write the tables.

    One model is in memory at a time; the reward is loaded with the last, the SFT model.
    """
    parents = find_parents(settings)
    policies = find_policies(settings)
    judge = load_judge(settings.data.judge) if settings.data.judge else None
    with Working("reading the data"):
        rows = load_prompts(settings.data, settings.seed).val
        demonstrations = held_out_demonstrations(settings)
    ready = make_ready(settings, parents)
    light = light_sources(ready, {name for row in rows.rows for name in row.columns})
    task = Task(
        ready=ready,
        config=config,
        prompts=held_out(ready, rows, tokenise_prompts),
        rows=[row.columns for row in rows.rows],
        references=held_out(ready, demonstrations, tokenise_demonstrations)
        if demonstrations
        else (),
        sources={name: str(policy.path) for name, policy in policies.items()},
    )
    shown = [
        f"{', '.join(policies)} and the SFT model on {len(task.prompts)} held-out prompts",
        f"{config.samples_per_prompt} sampled responses and a greedy one to each",
        *note_on_few(len(task.prompts), to_validate=True),
    ]
    print_line(", ".join(shown))
    if (differing := other_decoding(settings, policies)) is not None:
        print_line(differing, "yellow")
    answers = answers_of(task, policies)
    roles, _ = load_policy(task, parents.get(SFT))
    answers = {SFT: answer(task, SFT, roles, REFERENCE), **answers}
    microbatch = MicrobatchSize(f"{settings.stage}.batch_size", config.batch_size)
    reward = build_reward(ready, roles, light, microbatch)
    roles.to(ready.device)
    check_formats(ready, reward)
    read = partial(scored, task, roles, reward, judge, microbatch)
    with Working("scoring the responses"):
        found = [
            PolicySamples(
                name=name,
                samples={d: list(read(answered.rollouts[d])) for d in DECODINGS},
                perplexity=answered.perplexity,
            )
            for name, answered in answers.items()
        ]
    return hand_over_report(task, report(task, found))


def answers_of(task: Task, policies: Mapping[str, Source]) -> dict[str, Answers]:
    """Return the responses of each policy; its weights are freed before the next one is loaded."""
    answers = {}
    for name, policy in policies.items():
        roles, role = load_policy(task, policy)
        answers[name] = answer(task, name, roles, role)
        del roles
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return answers


def scored(
    task: Task,
    roles: Roles,
    reward: Reward,
    judge: Judge | None,
    microbatch: MicrobatchSize,
    rollouts: Sequence[Rollout],
) -> Iterator[Sample]:
    """Yield the samples of responses, with the numbers of reward, reference and judge.

    microbatch: number of rows that the reference and a reward on its base read at once.
    """
    ready, config = task.ready, task.config
    for rollout in rollouts:
        decoded = decode_responses(rollout.to(ready.device), task.rows, ready.chat)
        scores = score(
            roles,
            decoded,
            reward,
            temperature=config.temperature,
            batch_size=microbatch.rows,
            over_vocabulary=False,
        )
        result = EvaluationResult(rollout=rollout, decoded=decoded, scores=scores.to("cpu"))
        yield from evaluated(result, [term.name for term in reward.terms], judge)


def held_out_demonstrations(settings: Settings) -> Rows[Demonstration] | None:
    """Return the held-out demonstrations; None where the data name none."""
    if settings.data.demonstrations.train is None:
        return None
    return load_demonstrations(settings.data, settings.seed).val


def held_out(ready: Prepared, rows: Rows[R], tokenise: Callable[..., Tokenised[E]]) -> Sequence[E]:
    """Return at most data.max_val_rows of the rows that fit, as tokens: those of the training.

    Raises DataError where none fits.
    """
    data = ready.settings.data
    fitting = tokenise(rows, ready.chat, data)
    place = {number: i for i, number in enumerate(rows.numbers)}
    usable = rows.only([place[number] for number in fitting.numbers])
    kept = set(sample(usable, data.max_val_rows, ready.settings.seed).numbers)
    pairs = zip(fitting.examples, fitting.numbers, strict=True)
    return [example for example, number in pairs if number in kept]


def report(task: Task, policies: Sequence[PolicySamples]) -> PolicyReport:
    """Return the numbers of all policies and their comparisons."""
    settings, config, prompts = task.ready.settings, task.config, len(task.prompts)
    ks = (1, config.samples_per_prompt) if config.pass_k is None else config.pass_k
    passed = passes(policies, prompts, ks)
    numbers: dict[Decoding, dict[str, dict[str, float]]] = {d: {} for d in DECODINGS}
    for policy in policies:
        greedy = evaluation_metrics(policy.samples["greedy"])
        numbers["greedy"][policy.name] = {n: x for n, x in greedy.items() if n != "eval/kl"}
        sampled = evaluation_metrics(policy.samples["sampled"]) | passed[policy.name]
        if policy.perplexity is not None:
            sampled["eval/perplexity"] = policy.perplexity
        numbers["sampled"][policy.name] = sampled
    return PolicyReport(
        title=f"{run_name(settings)}: {', '.join(p.name for p in policies[1:])} and the SFT model",
        about={
            "prompts": prompts,
            "samples_per_prompt": config.samples_per_prompt,
            "temperature": config.temperature,
            "seed": settings.seed,
            "sources": dict(task.sources),
        },
        policies=policies,
        numbers=numbers,
        comparisons=compare_all(policies, prompts, settings.seed),
    )


def hand_over_report(task: Task, report: PolicyReport) -> Path:
    """Write the report to `final/`, print its tables and log its numbers; return the folder."""
    ready = task.ready
    settings = ready.settings
    check_names(report.metrics)
    folder = claim(settings, ready.parents)
    for shown in report.tables():
        get_console().print(shown)
    loggers = build_loggers(settings.logger, folder, identity(settings)) + ready.loggers
    final, exit_code = folder / FINAL, 1
    try:
        for logger in loggers:
            logger.log_metrics(report.metrics, step=0)
        for name, (columns, rows) in report.logged().items():
            log_table(loggers, name, columns, rows, 0)
        exit_code = 0
    finally:
        with Working("closing the loggers"):
            close_loggers(loggers, exit_code)
    with written_whole(final) as whole:
        whole.mkdir()
        report.write(whole, task.config.shown)
    leave_report(folder, settings.definition)
    print_line(f"{settings.stage} finished: {final / PAGE}")
    return final
