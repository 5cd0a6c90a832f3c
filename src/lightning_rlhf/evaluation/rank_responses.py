"""stage=rank: data from a policy's own responses, ranked by the reward."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_rlhf.core.config import RankConfig
from lightning_rlhf.core.errors import DataError, counted
from lightning_rlhf.core.kl import best_of_kl, best_of_kl_bound
from lightning_rlhf.core.metrics import BEST_JUDGE, JUDGE
from lightning_rlhf.data.formats import Kind, formats_of
from lightning_rlhf.data.rows import BadRow, counts_text
from lightning_rlhf.evaluation.evaluate_policy import Task
from lightning_rlhf.evaluation.evaluate_reward import leave_final
from lightning_rlhf.evaluation.policies import Source, check_policy, find_policy
from lightning_rlhf.io.console import json_line, print_line
from lightning_rlhf.models.checkpoint import Final, versions
from lightning_rlhf.models.config import SFT
from lightning_rlhf.report.comparison import Sample
from lightning_rlhf.runs.folders import FINAL, PARENTS
from lightning_rlhf.runs.run import Run
from lightning_rlhf.runs.stage import Settings, Stage

KEY = "rank.policy"


@dataclass(frozen=True)
class RankedRows:
    """Rows in the form that stage=sft, stage=rm and stage=dpo read."""

    preferences: list[dict[str, Any]] = field(default_factory=list)
    """{"prompt", "chosen", "rejected", "margin"}, with the difference of the scores as margin."""
    demonstrations: list[dict[str, Any]] = field(default_factory=list)
    """{"prompt", "response", "score"}: the best response to each prompt."""
    accepted: list[dict[str, Any]] = field(default_factory=list)
    """{"prompt", "response", "score"}: each response of at least the score to be accepted."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of responses that no row has, by reason."""

    def is_read(self, row: Mapping[str, Any], kind: Kind) -> bool:
        """Return whether the readers of the data read a row; else count the reason."""
        try:
            formats_of("native", kind)[0].read(row, kind)
        except BadRow as bad:
            self.left_out[bad.reason] += 1
            return False
        return True


def rank_samples(samples: Sequence[Mapping[str, Any]], config: RankConfig) -> RankedRows:
    """Return the rows from samples with the keys index, messages, response, ended and score.

    Responses that did not end, and such as the readers of the data refuse, are left out; so are
    repetitions of a response to the same prompt. Of equal scores the response that was sampled
    first counts as the better one.

    samples: those of one prompt, which `index` numbers, next to each other.
    """
    rows = RankedRows()
    for _, group in groupby(samples, key=lambda sample: sample["index"]):
        usable, seen = [], set()
        for sample in group:
            turns, response = sample["messages"], sample["response"]
            is_text = len(turns) == 1 and turns[0]["role"] == "user"
            prompt = turns[0]["content"] if is_text else turns
            row = {"prompt": prompt, "response": response, "score": sample["score"]}
            if not sample["ended"]:
                rows.left_out["cut at max_response_tokens"] += 1
            elif response in seen:
                rows.left_out["repeated response"] += 1
            elif rows.is_read(row, "demonstrations"):
                usable.append(row)
            seen |= {response} if sample["ended"] else set()
        usable.sort(key=lambda row: -row["score"])
        rows.demonstrations.extend(usable[:1])
        if config.accept_above is not None:
            rows.accepted.extend(row for row in usable if row["score"] >= config.accept_above)
        best_worst = [(usable[0], usable[-1])] if usable else []
        for better, worse in combinations(usable, 2) if config.pairs == "all" else best_worst:
            margin = better["score"] - worse["score"]
            sides = {"chosen": better["response"], "rejected": worse["response"]}
            row = {"prompt": better["prompt"], **sides, "margin": margin}
            if margin > 0 and margin >= config.min_margin and rows.is_read(row, "preferences"):
                rows.preferences.append(row)
    return rows


class Rank(Stage):
    """Preference pairs and demonstrations, from sampled and scored responses."""

    name = "rank"
    title = "Ranked responses"
    config = RankConfig
    data = "prompts"
    reads_reward = True
    reads_judge = True
    summary = ("rank/reward_mean", "rank/best_reward", "rank/pairs")
    hands_over = "report"
    numbers = "rank.json"
    divides = True

    def policy(self, settings: Settings) -> Source | None:
        """Return the policy that responds; None for the SFT model.

        Raises CheckpointError or HubError where it is not there or is no policy.
        """
        source = settings.config.policy
        return None if source is None else find_policy(source, KEY)

    def models(self, settings: Settings) -> Mapping[str, Final]:
        policy = self.policy(settings)
        return {"policy": policy} if isinstance(policy, Final) else {}

    def measure(self, run: Run) -> Path:
        settings, sft = run.settings, run.parents.get(SFT)
        config: RankConfig = settings.config
        policy = self.policy(settings)
        if policy is not None:
            check_policy(policy, sft, KEY)
        task = Task.prepare(run, config.prompts, config.max_prompts)
        name = SFT if policy is None else str(config.policy)
        start = policy or sft
        count = config.samples_per_prompt
        print_line(f"{count} responses of {name} to each of {counted(len(task.prompts), 'prompt')}")
        parts, _ = task.answers_of(name, start, {"sampled": (config.temperature, count)})
        samples = [
            sample | {"messages": task.rows[sample["index"]]["messages"]}
            for sample in task.scored(*task.load_reward(), parts["sampled"])
        ]
        if not run.replicas.is_first:
            sys.exit()
        ranked = rank_samples(samples, config)
        if not ranked.demonstrations:
            raise DataError(
                f"no response can be used: {counts_text(ranked.left_out)}; "
                f"rank.max_response_tokens is {config.max_response_tokens}"
            )
        metrics = rank_metrics(samples, ranked, count)
        files = {
            "preferences.jsonl": ranked.preferences,
            "demonstrations.jsonl": ranked.demonstrations,
            **({} if config.accept_above is None else {"accepted.jsonl": ranked.accepted}),
            "samples.jsonl": samples,
        }
        with leave_final(run, metrics) as (whole, _):
            for file, rows in files.items():
                lines = "".join(json_line(row) + "\n" for row in rows)
                (whole / file).write_text(lines, encoding="utf-8")
            provenance = {
                "metrics": metrics,
                "policy": {name: "the base model" if start is None else str(start.path)},
                "verdicts": task.verdicts,
                "parents": json.loads((run.folder / PARENTS).read_text(encoding="utf-8")),
                "left_out": dict(ranked.left_out),
                "config": settings.tree,
                "versions": versions(),
            }
            text = json.dumps(provenance, indent=1, default=vars) + "\n"
            (whole / self.numbers).write_text(text, encoding="utf-8")
        for line in summary_lines(metrics, ranked, config):
            print_line(line)
        if lacking := shortage(samples, ranked, config):
            print_line(f"warning: {lacking}", "yellow")
        final = run.folder / FINAL
        for file in files:
            print_line(f"written: {final / file}")
        return final


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


def summary_lines(
    metrics: Mapping[str, float], ranked: RankedRows, config: RankConfig
) -> Iterator[str]:
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
