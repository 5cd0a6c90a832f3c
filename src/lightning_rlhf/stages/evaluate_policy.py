"""The run of stage=eval_policy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import get_console

from lightning_rlhf.callbacks.evaluation import Judge, evaluation_metrics, load_judge
from lightning_rlhf.callbacks.loggers import close_loggers, log_table
from lightning_rlhf.core.config import PolicyEvalConfig
from lightning_rlhf.core.kl import best_of_kl_bound
from lightning_rlhf.core.metrics import check_names
from lightning_rlhf.data.readers import Rows, load
from lightning_rlhf.data.rows import Demonstration
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.models.config import REFERENCE, SFT
from lightning_rlhf.report.comparison import (
    DECODINGS,
    Decoding,
    PolicySamples,
    best_of,
    compare_all,
    passes,
)
from lightning_rlhf.report.evaluation_page import PAGE, PolicyReport
from lightning_rlhf.stages.console import note_on_few
from lightning_rlhf.stages.folder.folders import FINAL, run_name
from lightning_rlhf.stages.policies import (
    Source,
    check_policies,
    find_policies,
    other_decoding,
    other_sft,
)
from lightning_rlhf.stages.policy_answers import (
    Scorer,
    Task,
    answer,
    fitting,
    free,
    load_policy,
    numbers_of,
    sample_responses,
    told_verdicts,
)
from lightning_rlhf.stages.reward.build_rewards import light_sources
from lightning_rlhf.stages.run import Run
from lightning_rlhf.stages.run_report import leave_report
from lightning_rlhf.stages.stage import Settings


def run_eval_policy(ready: Run) -> Path:
    """Sample and score responses of the SFT model and of all policies; write the tables.

    One model is in memory at a time; the reward is loaded with the last, the SFT model.
    """
    settings, config, parents = ready.settings, ready.settings.config, ready.parents
    check_policies(settings, parents)
    policies = find_policies(settings)
    judge = load_judge(settings.data.judge) if settings.data.judge else None
    with Working("reading the data"):
        rows = load("prompts", settings.data, settings.seed).val
        demonstrations = held_out_demonstrations(settings)
    light = light_sources(ready, {name for row in rows.rows for name in row.columns})
    limit = settings.data.max_val_rows
    task = Task(
        ready=ready,
        config=config,
        prompts=fitting(ready, rows, limit),
        rows=[row.columns for row in rows.rows],
        references=() if demonstrations is None else fitting(ready, demonstrations, limit),
        sources={name: str(policy.path) for name, policy in policies.items()},
        verdicts=told_verdicts(ready),
    )
    shown = [
        f"{', '.join(policies)} and the SFT model on {len(task.prompts)} held-out prompts",
        f"{config.samples_per_prompt} sampled responses and a greedy one to each",
        *note_on_few(len(task.prompts), to_validate=True),
    ]
    print_line(", ".join(shown))
    for differing in (other_decoding(settings, policies), other_sft(policies, parents.get(SFT))):
        if differing is not None:
            print_line(differing, "yellow")
    found = answered(task, policies, light, judge)
    if not ready.replicas.is_first:
        sys.exit()
    return hand_over_report(task, report(task, found))


def answered(
    task: Task, policies: Mapping[str, Source], light: Mapping[str, Any], judge: Judge | None
) -> list[PolicySamples]:
    """Return the scored responses of the SFT model, then of the policies, then of best-of-n.

    light: checked components of the reward.
    """
    config: PolicyEvalConfig = task.ready.settings.config
    answers = {}
    for name, policy in policies.items():
        roles, role = load_policy(task, policy)
        answers[name] = answer(task, name, roles, role)
        del roles
        free()
    scorer = Scorer.load(task, light, judge)
    answers = {SFT: answer(task, SFT, scorer.roles, REFERENCE), **answers}
    with Working("scoring the responses"):
        mine = {
            name: {d: list(scorer.samples(given.rollouts[d])) for d in DECODINGS}
            for name, given in answers.items()
        }
        merged = task.ready.replicas.merged
        found = [
            PolicySamples(
                name=name,
                samples={
                    d: merged(numbers_of(given.rollouts[d]), mine[name][d]) for d in DECODINGS
                },
                perplexity=given.perplexity,
            )
            for name, given in answers.items()
        ]
    if config.best_of is not None:
        found.append(best_of_sft(scorer, config.best_of, found[0]))
    return found


def best_of_sft(scorer: Scorer, n: int, sft: PolicySamples) -> PolicySamples:
    """Return the best of each n responses of the SFT model, as responses of one more policy.

    Its greedy responses are those of the SFT model, of which there is one a prompt.
    """
    task = scorer.task
    count = task.config.samples_per_prompt
    parts = sample_responses(
        task, f"{SFT}, best of {n}", scorer.roles, REFERENCE, task.config.temperature, n * count
    )
    with Working("scoring the responses"):
        samples = task.ready.replicas.merged(numbers_of(parts), scorer.samples(parts))
    return PolicySamples(
        name=f"best of {n}",
        samples={"sampled": best_of(samples, n, count), "greedy": sft.samples["greedy"]},
        perplexity=None,
        best_of=n,
    )


def held_out_demonstrations(settings: Settings) -> Rows[Demonstration] | None:
    """Return the held-out demonstrations; None where the data name none."""
    if settings.data.demonstrations.train is None:
        return None
    return load("demonstrations", settings.data, settings.seed).val


def report(task: Task, policies: Sequence[PolicySamples]) -> PolicyReport:
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
            "sources": dict(task.sources),
            "verdicts": task.verdicts,
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
    folder = ready.claim()
    for shown in report.tables():
        get_console().print(shown)
    loggers = ready.open_loggers()
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
    with written_whole(final, kind="folder") as whole:
        report.write(whole, settings.config.shown)
    leave_report(folder, settings.definition)
    print_line(f"{settings.stage} finished: {final / PAGE}")
    return final
