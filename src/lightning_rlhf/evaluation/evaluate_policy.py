"""stage=eval_policy and stage=rank: responses of policies, compared or written as data."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning.pytorch.loggers import Logger
from rich import get_console

from lightning_rlhf.callbacks.evaluation import evaluation_metrics
from lightning_rlhf.callbacks.loggers import log_table
from lightning_rlhf.core import errors, kl
from lightning_rlhf.core.config import PolicyEvalConfig, RankConfig
from lightning_rlhf.core.metrics import BEST_JUDGE, HELD_OUT, JUDGE
from lightning_rlhf.data import formats, lengths
from lightning_rlhf.data.rows import BadRow, counts_text
from lightning_rlhf.evaluation import evaluate_reward, policies
from lightning_rlhf.io.console import json_line, print_line
from lightning_rlhf.models.checkpoint import Final, versions
from lightning_rlhf.models.config import SFT
from lightning_rlhf.report import comparison
from lightning_rlhf.rollout.sampler import GREEDY
from lightning_rlhf.runs import folders, stage
from lightning_rlhf.runs.run import Run

CUT = "cut at max_response_tokens"


class EvalPolicy(stage.Stage):
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
    numbers = comparison.NUMBERS
    divides = True

    def models(self, settings: stage.Settings) -> Mapping[str, Final]:
        found = policies.find_policies(settings)
        return {f"policy {name}": one for name, one in found.items() if isinstance(one, Final)}

    def measure(self, run: Run) -> Path:
        settings = run.settings
        config: PolicyEvalConfig = settings.config
        count, n = config.samples_per_prompt, config.best_of
        sources = policies.find_policies(settings)
        policies.check_policies(run, sources, "eval_policy.policies")
        limit = settings.data.max_val_rows
        task = policies.Task(run, "val", limit)
        if settings.data.demonstrations.train is not None:
            demonstrations = run.rows("demonstrations").val
            task.references = policies.fitting_tokens(run, demonstrations, limit)
        shown = f"{', '.join(sources)} and the SFT model on {len(task.prompts)} held-out prompts, "
        shown += f"{count} sampled responses and a greedy one to each"
        print_line(", ".join([shown, *lengths.note_on_few(len(task.prompts), to_validate=True)]))
        decodings = {"sampled": (config.temperature, count), "greedy": (GREEDY, 1)}
        best = {} if n is None else {f"best of {n}": (config.temperature, n * count)}
        found = task.respond(sources, decodings, decodings | best)
        for name in best:
            # The greedy responses are those of the SFT model, of which there is one a prompt.
            chosen = comparison.best_of(found[0].samples[name], n or 1, count)
            samples = {**found[0].samples, "sampled": chosen}
            found.append(comparison.PolicySamples(name=name, samples=samples, best_of=n))
        content, rows = evaluation_of(task, sources, found), list(comparison.side_by_side(found))
        with evaluate_reward.leave_final(run, content["metrics"]) as (whole, loggers):
            tables = comparison.evaluation_tables(content, is_brief=True)
            for name in ("sampled", "greedy", "pass@k", "sampled, paired"):
                if name in tables:
                    get_console().print(tables[name].console())
            log_evaluation(loggers, content, rows)
            names = ", ".join((*sources, *best))
            title = f"{folders.run_name(settings)}: {names} and the SFT model"
            comparison.write_evaluation(whole, title, content, rows, config.shown)
        print_line(f"{settings.stage} finished: {run.folder / folders.FINAL / comparison.PAGE}")
        return run.folder / folders.FINAL


def evaluation_of(
    task: policies.Task,
    sources: Mapping[str, policies.Source],
    found: Sequence[comparison.PolicySamples],
) -> dict[str, Any]:
    """Return the content of evaluation.json: the numbers of all policies and their comparisons.

    found: samples of the SFT model, then of the policies. The metrics are those of the first policy
    against the SFT model. Numbers that are not finite are None, and left out of the metrics.
    """
    settings, prompts = task.run.settings, len(task.prompts)
    config: PolicyEvalConfig = settings.config
    ks = (1, config.samples_per_prompt) if config.pass_k is None else config.pass_k
    passed = comparison.passes(found, prompts, ks, settings.seed)
    numbers: dict[str, dict[str, dict[str, float | None]]] = {}
    for policy in found:
        sampled, greedy = (evaluation_metrics(policy.samples[one]) for one in comparison.DECODINGS)
        del greedy["eval/kl"]
        sampled |= {name: mean for name, (mean, _) in passed[policy.name].items()}
        if policy.perplexity is not None:
            sampled["eval/perplexity"] = policy.perplexity
        if policy.best_of is not None:
            sampled["eval/best_of_kl_bound"] = kl.best_of_kl_bound(policy.best_of)
        numbers[policy.name] = {
            decoding: {name: x if math.isfinite(x) else None for name, x in some.items()}
            for decoding, some in (("sampled", sampled), ("greedy", greedy))
        }
    comparisons = comparison.compare_all(found, prompts, settings.seed)
    gain = comparisons[0]  # of the reward of the first policy's samples over the SFT model's
    metrics = {n: x for n, x in numbers[gain["policy"]]["sampled"].items() if x is not None}
    metrics |= {"eval/reward_gain": gain["difference"], "eval/win_rate": gain["win_rate"]}
    for name, interval in (("reward_gain", "interval"), ("win_rate", "win_interval")):
        if gain[interval] is not None:
            metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"] = gain[interval]
    return {
        "metrics": metrics,
        "prompts": prompts,
        "samples_per_prompt": config.samples_per_prompt,
        "temperature": config.temperature,
        "seed": settings.seed,
        "sources": {name: str(source.path) for name, source in sources.items()},
        "verdicts": task.verdicts,
        "policies": numbers,
        "pass_intervals": {
            policy: {name: interval for name, (_, interval) in of.items()}
            for policy, of in passed.items()
        },
        "comparisons": comparisons,
    }


def log_evaluation(
    loggers: Sequence[Logger], content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Log the numbers, the comparisons and the responses, as tables.

    content: of evaluation.json; rows: of `side_by_side`.
    """
    numbers = [
        (name, decoding, *number)
        for name, of in content["policies"].items()
        for decoding, found in of.items()
        for number in found.items()
    ]
    log_table(loggers, "evaluation", ("policy", "decoding", "number", "value"), numbers)
    compared = [list(one.values()) for one in content["comparisons"]]
    log_table(loggers, "comparisons", list(content["comparisons"][0]), compared)
    texts = [
        (row["prompt"], row["decoding"], *(one["response"] for one in row["responses"].values()))
        for row in rows
    ]
    log_table(loggers, "side_by_side", ("prompt", "decoding", *content["policies"]), texts)


Ranked = Mapping[str, list[dict[str, Any]]]
"""Rows that stage=sft, stage=rm and stage=dpo read: "preferences" {"prompt", "chosen", "rejected",
"margin"}, with the difference of the scores as margin; "demonstrations" {"prompt", "response",
"score"}, the best response to each prompt; "accepted", each response of at least the score to be
accepted."""


def rank_samples(
    samples: Sequence[Mapping[str, Any]], config: RankConfig
) -> tuple[Ranked, Counter[str]]:
    """Return the rows from samples, and the number of responses that no row has, by reason.

    Responses that did not end, and such as the readers of the data refuse, are left out; so are
    repetitions of a response to the same prompt. Of equal scores the response that was sampled
    first counts as the better one.

    samples: with the keys index, messages, response, ended and score; those of one prompt, which
        `index` numbers, next to each other.
    """
    rows: Ranked = {"preferences": [], "demonstrations": [], "accepted": []}
    left_out: Counter[str] = Counter()

    def is_read(row: Mapping[str, Any], kind: formats.Kind) -> bool:
        try:
            formats.formats_of("native", kind)[0].read(row, kind)
        except BadRow as bad:
            left_out[bad.reason] += 1
            return False
        return True

    for _, group in groupby(samples, key=lambda sample: sample["index"]):
        usable, seen = [], set()
        for sample in group:
            turns, response = sample["messages"], sample["response"]
            is_text = len(turns) == 1 and turns[0]["role"] == "user"
            prompt = turns[0]["content"] if is_text else turns
            row = {"prompt": prompt, "response": response, "score": sample["score"]}
            if not sample["ended"]:
                left_out[CUT] += 1
            elif response in seen:
                left_out["repeated response"] += 1
            else:
                seen.add(response)
                usable += [row] * is_read(row, "demonstrations")
        usable.sort(key=lambda row: -row["score"])
        rows["demonstrations"] += usable[:1]
        if config.accept_above is not None:
            rows["accepted"] += [row for row in usable if row["score"] >= config.accept_above]
        pairs = [(usable[0], usable[-1])] if usable else []
        for better, worse in combinations(usable, 2) if config.pairs == "all" else pairs:
            margin = better["score"] - worse["score"]
            sides = {"chosen": better["response"], "rejected": worse["response"]}
            row = {"prompt": better["prompt"], **sides, "margin": margin}
            if margin > 0 and margin >= config.min_margin and is_read(row, "preferences"):
                rows["preferences"].append(row)
    return rows, left_out


class Rank(stage.Stage):
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

    def sources(self, settings: stage.Settings) -> dict[str, policies.Source]:
        """Return the policy that responds, by its name; {} for the SFT model."""
        source = settings.config.policy
        return {} if source is None else {source: policies.find_policy(source, "rank.policy")}

    def models(self, settings: stage.Settings) -> Mapping[str, Final]:
        found = next(iter(self.sources(settings).values()), None)
        return {"policy": found} if isinstance(found, Final) else {}

    def measure(self, run: Run) -> Path:
        settings, sources = run.settings, self.sources(run.settings)
        config: RankConfig = settings.config
        policies.check_policies(run, sources, "rank.policy")
        task = policies.Task(run, config.prompts, config.max_prompts)
        count = config.samples_per_prompt
        name, start = next(iter(sources.items()), (SFT, run.parents.get(SFT)))
        print_line(
            f"{count} responses of {name} to each of {errors.counted(len(task.prompts), 'prompt')}"
        )
        decodings = {"sampled": (config.temperature, count)}
        (policy,) = task.respond(sources, decodings, {} if sources else decodings)
        answers = policy.samples["sampled"]
        samples = [{**one, "messages": task.rows[one["index"]]["messages"]} for one in answers]
        ranked, left_out = rank_samples(samples, config)
        if not ranked["demonstrations"]:
            raise errors.DataError(
                f"no response can be used: {counts_text(left_out)}; "
                f"rank.max_response_tokens is {config.max_response_tokens}"
            )
        metrics = rank_metrics(samples, ranked, left_out, count)
        files = {**ranked, "samples": samples}
        if config.accept_above is None:
            del files["accepted"]
        with evaluate_reward.leave_final(run, metrics) as (whole, _):
            for kind, rows in files.items():
                lines = "".join(json_line(row) + "\n" for row in rows)
                (whole / f"{kind}.jsonl").write_text(lines, encoding="utf-8")
            provenance = {
                "metrics": metrics,
                "policy": {name: "the base model" if start is None else str(start.path)},
                "verdicts": task.verdicts,
                "parents": json.loads((run.folder / folders.PARENTS).read_text(encoding="utf-8")),
                "left_out": dict(left_out),
                "config": settings.tree,
                "versions": versions(),
            }
            text = json.dumps(provenance, indent=1, default=vars) + "\n"
            (whole / self.numbers).write_text(text, encoding="utf-8")
        print_line(
            f"reward {metrics['rank/reward_mean']:z.3f}, of the best of {count} "
            f"{metrics['rank/best_reward']:z.3f} at a KL of {metrics['rank/best_kl']:.2f} nats "
            f"(bound {metrics['rank/best_kl_bound']:.2f})"
        )
        print_line(f"left out: {counts_text(left_out) or 'none'}")
        final = run.folder / folders.FINAL
        for kind, rows in files.items():
            print_line(f"written: {final / kind}.jsonl, {errors.counted(len(rows), 'row')}")
        empty, cut = [kind for kind in files if not files[kind]], left_out[CUT]
        if empty or 2 * cut > len(samples):
            print_line(
                f"warning: files without a row: {', '.join(empty) or 'none'}; {cut} of "
                f"{len(samples)} responses are cut at rank.max_response_tokens and left out; a "
                "larger one, or rank.stop_strings, lets them end; rank.min_margin and "
                "rank.accept_above leave out others",
                "yellow",
            )
        return final


def rank_metrics(
    samples: Sequence[comparison.Sample], ranked: Ranked, left_out: Counter[str], n: int
) -> dict[str, float]:
    """Return the numbers of the ranked responses, of which `n` next to each other answer a prompt.

    The best response is that of the highest score, whether it ended or not.
    """
    groups = [samples[i : i + n] for i in range(0, len(samples), n)]
    best = [max(group, key=lambda s: s["score"]) for group in groups]
    found = {
        "rank/reward_mean": fmean(s["score"] for s in samples),
        "rank/best_reward": fmean(s["score"] for s in best),
        "rank/best_kl": fmean(kl.best_of_kl([s["score"] for s in group], n) for group in groups),
        "rank/best_kl_bound": kl.best_of_kl_bound(n),
        "rank/pairs": float(len(ranked["preferences"])),
        "rank/demonstrations": float(len(ranked["demonstrations"])),
        "rank/accepted": float(len(ranked["accepted"])),
        "rank/left_out": float(left_out.total()),
    }
    for prefix, some in ((JUDGE, samples), (BEST_JUDGE, best)):
        for name, mean in evaluation_metrics(some).items():
            if name.startswith(JUDGE):
                found[prefix + name.removeprefix(JUDGE)] = mean
    return found
