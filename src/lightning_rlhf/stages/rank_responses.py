"""The run of stage=rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_rlhf.callbacks.evaluation import load_judge
from lightning_rlhf.callbacks.loggers import close_loggers
from lightning_rlhf.core.config import RankConfig
from lightning_rlhf.core.errors import DataError, counted
from lightning_rlhf.core.kl import best_of_kl, best_of_kl_bound
from lightning_rlhf.core.metrics import BEST_JUDGE, JUDGE, check_names
from lightning_rlhf.data.ranked import RankedRows, rank
from lightning_rlhf.data.readers import counts_text, load
from lightning_rlhf.io.console import Working, json_line, print_line
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.models.checkpoint import versions
from lightning_rlhf.models.config import SFT
from lightning_rlhf.stages.folder.folders import FINAL, PARENTS
from lightning_rlhf.stages.policies import RESPONDER, check_policy, responder
from lightning_rlhf.stages.policy_answers import (
    Scorer,
    Task,
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

Sample = Mapping[str, Any]


def run_rank(ready: Run) -> Path:
    """Sample responses of the policy, score them, and write the rows made of them."""
    settings, config, parents = ready.settings, ready.settings.config, ready.parents
    policy = responder(settings)
    if policy is not None:
        check_policy(policy, parents, RESPONDER)
    judge = load_judge(settings.data.judge) if settings.data.judge else None
    with Working("reading the data"):
        split = load("prompts", settings.data, settings.seed)
    rows = split.train if config.prompts == "train" else split.val
    light = light_sources(ready, {name for row in rows.rows for name in row.columns})
    name = SFT if policy is None else str(config.policy)
    task = Task(
        ready=ready,
        config=config,
        prompts=fitting(ready, rows, config.max_prompts),
        rows=[row.columns for row in rows.rows],
        references=(),
        sources={name: str(policy.path) if policy is not None else _path_of(parents.get(SFT))},
        verdicts=told_verdicts(ready),
    )
    print_line(
        f"{config.samples_per_prompt} responses of {name} to each of "
        f"{counted(len(task.prompts), 'prompt')}"
    )
    roles, role = load_policy(task, policy if policy is not None else parents.get(SFT))
    parts = sample_responses(task, name, roles, role, config.temperature, config.samples_per_prompt)
    del roles
    free()
    scorer = Scorer.load(task, light, judge)
    numbers = numbers_of(parts)
    with Working("scoring the responses", len(numbers)) as working:
        mine = working.track(scorer.samples(parts))
        merged = ready.replicas.merged(numbers, mine)
    if not ready.replicas.is_first:
        sys.exit()
    samples = [sample | {"messages": task.rows[sample["index"]]["messages"]} for sample in merged]
    ranked = rank(
        samples,
        pairs=config.pairs,
        min_margin=config.min_margin,
        accept_above=config.accept_above,
    )
    if not ranked.demonstrations:
        raise DataError(
            f"no response can be used: {counts_text(ranked.left_out)}; rank.max_response_tokens is "
            f"{config.max_response_tokens}"
        )
    return hand_over_rows(task, samples, ranked)


def _path_of(final: Any) -> str:
    return "the base model" if final is None else str(final.path)


def rank_metrics(samples: Sequence[Sample], ranked: RankedRows, n: int) -> dict[str, float]:
    """Return the numbers of the ranked responses, of which `n` next to each other answer a prompt.

    The best response is that of the highest score, whether it ended or not.
    """
    groups = [samples[i : i + n] for i in range(0, len(samples), n)]
    best = [max(group, key=lambda s: s["score"]) for group in groups]
    found = {
        "rank/reward_mean": fmean(s["score"] for s in samples),
        "rank/best_reward": fmean(s["score"] for s in best),
        "rank/best_kl": fmean(best_of_kl([s["score"] for s in group], n) for group in groups),
        "rank/best_kl_bound": best_of_kl_bound(n),
        "rank/pairs": float(len(ranked.preferences)),
        "rank/demonstrations": float(len(ranked.demonstrations)),
        "rank/accepted": float(len(ranked.accepted)),
        "rank/left_out": float(sum(ranked.left_out.values())),
    }
    for prefix, some in ((JUDGE, samples), (BEST_JUDGE, best)):
        for part in sorted({part for sample in some for part in sample["judge"]}):
            known = [s["judge"][part] for s in some if s["judge"].get(part) is not None]
            if known:
                found[prefix + part] = fmean(known)
    return found


def hand_over_rows(task: Task, samples: Sequence[Sample], ranked: RankedRows) -> Path:
    """Write the rows and their provenance to `final/`, log the numbers; return the folder."""
    ready, config = task.ready, task.config
    assert isinstance(config, RankConfig)
    settings = ready.settings
    metrics = rank_metrics(samples, ranked, config.samples_per_prompt)
    check_names(metrics)
    folder = ready.claim()
    loggers = ready.open_loggers()
    final, exit_code = folder / FINAL, 1
    try:
        for logger in loggers:
            logger.log_metrics(metrics, step=0)
        exit_code = 0
    finally:
        with Working("closing the loggers"):
            close_loggers(loggers, exit_code)
    files = {
        "preferences.jsonl": ranked.preferences,
        "demonstrations.jsonl": ranked.demonstrations,
        **({} if config.accept_above is None else {"accepted.jsonl": ranked.accepted}),
        "samples.jsonl": samples,
    }
    with written_whole(final, kind="folder") as whole:
        for name, rows in files.items():
            (whole / name).write_text("".join(map(_line, rows)), encoding="utf-8")
        provenance = {
            "metrics": metrics,
            "policy": dict(task.sources),
            "verdicts": task.verdicts,
            "parents": json.loads((folder / PARENTS).read_text(encoding="utf-8")),
            "left_out": dict(ranked.left_out),
            "config": settings.tree,
            "versions": versions(),
        }
        (whole / settings.definition.numbers).write_text(
            json.dumps(provenance, indent=1, default=vars) + "\n", "utf-8"
        )
    leave_report(folder, settings.definition)
    for line in summary(metrics, ranked, config):
        print_line(line)
    if lacking := shortage(samples, ranked, config):
        print_line(f"warning: {lacking}", "yellow")
    for name in files:
        print_line(f"written: {final / name}")
    return final


def _line(row: Mapping[str, Any]) -> str:
    return json_line(row) + "\n"


def summary(metrics: Mapping[str, float], ranked: RankedRows, config: RankConfig) -> Iterator[str]:
    """Yield the numbers as lines of the console."""
    n = config.samples_per_prompt
    yield (
        f"reward {metrics['rank/reward_mean']:z.3f}, of the best of {n} "
        f"{metrics['rank/best_reward']:z.3f} at a KL of {metrics['rank/best_kl']:.2f} nats (bound "
        f"{metrics['rank/best_kl_bound']:.2f})"
    )
    parts = [
        counted(len(ranked.preferences), "preference pair"),
        counted(len(ranked.demonstrations), "best response"),
    ]
    if config.accept_above is not None:
        parts.append(counted(len(ranked.accepted), "accepted response"))
    yield ", ".join(parts)
    if ranked.left_out:
        yield f"left out: {counts_text(ranked.left_out)}"


def shortage(samples: Sequence[Sample], ranked: RankedRows, config: RankConfig) -> str:
    """Return which files have no row, and that most responses are cut; empty if neither is so."""
    found = []
    if not ranked.preferences:
        found.append(
            "preferences.jsonl is empty: no prompt has two usable responses whose scores differ"
            + f" by rank.min_margin={config.min_margin:g} or more" * (config.min_margin > 0)
        )
    if config.accept_above is not None and not ranked.accepted:
        found.append(
            "accepted.jsonl is empty: no usable response scores "
            f"rank.accept_above={config.accept_above:g} or more"
        )
    cut = sum(not sample["ended"] for sample in samples)
    if cut and (found or 2 * cut > len(samples)):
        found.append(
            f"{cut} of {len(samples)} responses are cut at "
            f"rank.max_response_tokens={config.max_response_tokens} and left out; a larger "
            "rank.max_response_tokens, or rank.stop_strings, lets them end"
        )
    return "; ".join(found)
