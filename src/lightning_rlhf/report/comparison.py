"""Policies compared on the same prompts: paired differences, win rates, pass@k, and their files."""

import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lightning_rlhf.core import errors, metrics
from lightning_rlhf.core.kl import best_of_kl
from lightning_rlhf.io.console import json_line
from lightning_rlhf.report import estimates
from lightning_rlhf.report.tables import ABSENT, Table, plain, spread, table

PAGE, NUMBERS, SAMPLES = "evaluation.md", "evaluation.json", "samples.jsonl"
CHARACTERS = 600
"""Largest number of characters of a response or prompt in evaluation.md."""
Sample = Mapping[str, Any]
Decoding = Literal["sampled", "greedy"]
DECODINGS: tuple[Decoding, ...] = ("sampled", "greedy")
REWARD = "reward"
"""Name of the score of the whole reward."""
UNSCORED: Mapping[Decoding, Sequence[str]] = {"sampled": ("kl", "tokens"), "greedy": ("tokens",)}
"""Keys of a sample that are compared and have no better or worse; the log-ratio of a greedy
response is no estimate of the KL."""
DEFINITIONS = """
Greedy responses take the most probable token each time; the others are sampled, with the same
random numbers for every policy, so that differences are paired: means over prompts of the
difference of two policies' means over responses, with a 95% interval by studentised bootstrap over
prompts. The win rate is the share of responses that score above the other policy's with the same
random numbers, a tie counting one half; its 95% interval is a percentile bootstrap over the prompts
and three more: one won, one tied, one lost. KL is the mean over sampled responses of the sum over
tokens of log p - log p_SFT at the sampling temperature. Perplexity of the demonstrations is exp of
the mean loss over the response tokens of held-out demonstrations; that of the responses exp of
minus the mean log-probability that the SFT model, at the sampling temperature, gives their tokens.
The shares of different words and pairs of words (distinct-1, distinct-2) are those among all of all
responses. pass@k, for scores of 0 and 1 alone, is 1 - C(n - c, k) / C(n, k) for n responses of
which c pass, averaged over prompts. The KL of the best of n is estimated from the scores s of the
SFT model's responses to a prompt, as sum over s of w log(w / p) with p the share of s and w = P(x
<= s)^n - P(x < s)^n; it is at most log n - (n - 1) / n.
"""
"""Definitions of the numbers."""


@dataclass(frozen=True, kw_only=True)
class PolicySamples:
    """Responses of one policy to the prompts, in the prompts' order."""

    name: str
    samples: Mapping[str, Sequence[Sample]]
    """Samples of each decoding, the same number for every prompt, one prompt after the other."""
    perplexity: float | None = None
    """Perplexity of the held-out demonstrations; None where it was not measured."""
    best_of: int | None = None
    """Number of responses of which each sample is the best; None for a policy's own samples."""


def compare_all(policies: Sequence[PolicySamples], prompts: int, seed: int) -> list[dict[str, Any]]:
    """Return the comparisons of each policy with the first, then of the others with each other.

    prompts: number of prompts; seed: of the resamples.

    Returns: for each of `scores` and of UNSCORED, which has no win rate, that some prompt has in
    both policies, the names of the policies, of the decoding and of the number, with
        prompts: number of prompts for which both policies have the number;
        difference: mean over prompts of the difference of the policies' means over responses;
        interval: its 95% interval, by bootstrap over prompts; None for one prompt;
        win_rate: mean over prompts of the share of paired responses of `policy` that score higher,
            a tie counting one half, with win_interval like the other interval;
        ties: mean over prompts of the share of ties.
    """
    first, *others = policies
    pairs = [(policy, first) for policy in others] + [(b, a) for a, b in combinations(others, 2)]
    names, found = scores(policies), []
    for pair, decoding in product(pairs, DECODINGS):
        for number in (*names, *UNSCORED[decoding]):
            ours, theirs = (number_table(one.samples[decoding], number, prompts) for one in pair)
            difference = (ours.mean(axis=1) - theirs.mean(axis=1)).compressed()
            if not len(difference):
                continue
            interval = win_rate = win_interval = ties = None
            if len(difference) > 1:
                interval = estimates.single(estimates.mean_interval(difference, seed))
            if number not in UNSCORED[decoding]:
                tied = (ours == theirs).astype(float)
                wins = ((ours > theirs) + 0.5 * tied).mean(axis=1).compressed()
                win_rate, ties = float(wins.mean()), float(tied.mean(axis=1).compressed().mean())
                if len(wins) > 1:
                    win_interval = estimates.single(estimates.rate_interval(wins, seed))
            policy, other = (one.name for one in pair)
            about = {"policy": policy, "other": other, "decoding": decoding, "number": number}
            means = {"difference": float(difference.mean()), "interval": interval}
            rates = {"win_rate": win_rate, "win_interval": win_interval, "ties": ties}
            found.append({**about, "prompts": len(difference), **means, **rates})
    return found


def scores(policies: Sequence[PolicySamples]) -> list[str]:
    """Return the names of the scores: the reward, its components if there are several, the judge's.

    A component or a part of the judge's verdict is named "reward/NAME" or "judge/NAME".
    """
    found = [s for policy in policies for d in DECODINGS for s in policy.samples[d]]
    parts = list(found[0]["parts"])
    judged = sorted({part for sample in found for part in sample["judge"]})
    components = [f"{REWARD}/{part}" for part in parts] if len(parts) > 1 else []
    return [REWARD, *components, *(f"judge/{part}" for part in judged)]


def number_column(samples: Sequence[Sample], number: str) -> Float[ndarray, " S"]:
    """Return a number of every sample; NaN where a sample has none.

    number: "reward", "reward/COMPONENT", "judge/PART", or another key of a sample.
    """
    kind, _, part = number.partition("/")
    inside = {REWARD: "parts", "judge": "judge"}.get(kind) if part else None
    key = "score" if number == REWARD else number
    found = [s.get(key) if inside is None else s[inside].get(part) for s in samples]
    return np.array(found, float)  # NaN for None


def number_table(samples: Sequence[Sample], number: str, prompts: int) -> Any:
    """Return a number of every sample as a masked array, one row a prompt."""
    return np.ma.masked_invalid(number_column(samples, number).reshape(prompts, -1))


def passes(
    policies: Sequence[PolicySamples], prompts: int, ks: Sequence[int], seed: int
) -> dict[str, dict[str, tuple[float, estimates.Interval | None]]]:
    """Return the mean over prompts of pass@k of the sampled responses.

    Returns: policy -> "eval/pass@<k>/<score>" -> the mean and its 95% interval, by bootstrap over
    prompts; None for one prompt.

    Only scores that are 0 or 1 in every response of every policy have one. A prompt counts where at
    least k of its responses have the score.
    """
    found: dict[str, dict[str, Any]] = {policy.name: {} for policy in policies}
    for name in scores(policies):
        tables = [number_table(policy.samples["sampled"], name, prompts) for policy in policies]
        if not all(np.isin(one.compressed(), (0, 1)).all() for one in tables):
            continue
        for policy, one in zip(policies, tables, strict=True):
            rows = [(row.compressed() == 1).tolist() for row in one]
            for k in ks:
                usable = np.array([pass_at_k(row, k) for row in rows if len(row) >= k])
                if len(usable):
                    ends = estimates.rate_interval(usable, seed) if len(usable) > 1 else None
                    interval = None if ends is None else estimates.single(ends)
                    found[policy.name][f"{metrics.PASS}{k}/{name}"] = usable.mean().item(), interval
    return found


def pass_at_k(passed: Sequence[bool], k: int) -> float:
    """Return the unbiased estimate of the probability that one of k responses passes.

        pass@k = 1 - C(n - c, k) / C(n, k), with n responses of which c pass; k <= n

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1
    """
    n, c = len(passed), sum(passed)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_of(samples: Sequence[Sample], n: int, count: int) -> list[Sample]:
    """Return the sample of the highest score of each n, the first of equal ones.

    samples: n * count samples of each prompt, one prompt after the other. The KL of a returned
    sample is that of best-of-n to the policy of the samples, as its prompt's scores estimate it.
    """
    found: list[Sample] = []
    size = n * count
    for group in (samples[start : start + size] for start in range(0, len(samples), size)):
        kl = best_of_kl([s["score"] for s in group], n)
        best = (max(group[i : i + n], key=lambda s: s["score"]) for i in range(0, size, n))
        found += [{**sample, "kl": kl} for sample in best]
    return found


def side_by_side(policies: Sequence[PolicySamples]) -> Iterator[dict[str, Any]]:
    """Yield a row for each response: the prompt, and what each policy responds to it."""
    for decoding in DECODINGS:
        for samples in zip(*(p.samples[decoding] for p in policies), strict=True):
            responses = {
                policy.name: {k: x for k, x in s.items() if k not in ("index", "prompt")}
                for policy, s in zip(policies, samples, strict=True)
            }
            place = {key: samples[0][key] for key in ("index", "prompt")}
            yield {**place, "decoding": decoding, "responses": responses}


def write_evaluation(
    folder: Path, title: str, content: Mapping[str, Any], rows: Sequence[Sample], shown: int
) -> None:
    """Write evaluation.md, evaluation.json and samples.jsonl.

    content: of evaluation.json; rows: of `side_by_side`; shown: number of prompts in evaluation.md.
    """
    numbers = json.dumps(content, indent=2, default=vars) + "\n"
    (folder / NUMBERS).write_text(numbers, encoding="utf-8")
    lines = "".join(json_line(row) + "\n" for row in rows)
    (folder / SAMPLES).write_text(lines, encoding="utf-8")
    sections = [
        f"# {plain(title, CHARACTERS)}",
        f"Measured on {errors.counted(content['prompts'], 'held-out prompt')}, with "
        f"{errors.counted(content['samples_per_prompt'], 'sampled response')} and one greedy "
        f"response to each; temperature {content['temperature']:g}.",
        *(plain(f"Reward {n}: {v.words}", CHARACTERS) for n, v in content["verdicts"].items()),
    ]
    for name, found in evaluation_tables(content).items():
        heading = "pass@k" if name == "pass@k" else found.title
        is_paired = name.endswith("paired")
        sections += [] if is_paired else [f"## {heading}"]
        sections.append(found.markdown(CHARACTERS, (2, 3, 4) if is_paired else None))
    sections.append("## Side by side")
    for row in spread([row for row in rows if row["decoding"] == "greedy"], shown):
        cells = []
        for name, sample in row["responses"].items():
            judge = [f"{part} {x:z.2f}" for part, x in sample["judge"].items() if x is not None]
            texts = (name, sample["response"], ", ".join(judge) or ABSENT)
            policy, response, judged = (plain(text, CHARACTERS) for text in texts)
            cells.append((policy, response, f"{sample['score']:+z.2f}", judged))
        sections.append(f"**{plain(row['prompt'], CHARACTERS)}**")
        sections.append(table(["policy", "greedy response", "reward", "judge"], cells, (2,)))
    sections += ["## What the numbers are", plain(DEFINITIONS, len(DEFINITIONS))]
    (folder / PAGE).write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def evaluation_tables(content: Mapping[str, Any], *, is_brief: bool = False) -> dict[str, Table]:
    """Return the tables of an evaluation of policies, for the console and the pages.

    content: of evaluation.json.
    is_brief: whether pass@k and comparisons are those of scores and the gold part of the judge.
    Returns: "sampled", "sampled, paired", the same of "greedy", and "pass@k" where there is any.
    """
    policies: Mapping[str, Mapping[str, Mapping[str, float | None]]] = content["policies"]
    intervals = content.get("pass_intervals", {})
    tables: dict[str, Table] = {}
    passed: list[list[str]] = []
    number, interval = estimates.number_text, estimates.interval_text

    def is_shown(name: str) -> bool:
        return not is_brief or name == "judge/gold" or not name.startswith("judge/")

    for decoding in DECODINGS:
        columns = [found.get(decoding, {}) for found in policies.values()]
        rows: list[list[str]] = []
        for name in dict.fromkeys(name for column in columns for name in column):
            label = (
                name
                if name.startswith(metrics.JUDGE)
                else metrics.label_of(name).removeprefix("the ")
            )
            label = label.removeprefix("eval/").removesuffix(" on held-out prompts")
            row = [label, *(number(column.get(name)) for column in columns)]
            if not name.startswith(metrics.PASS):
                rows.append(row)
            elif is_shown(label.partition("/")[2]):
                ends = [intervals.get(policy, {}).get(name) for policy in policies]
                passed.append([label, *map(operator.add, row[1:], map(interval, ends))])
        title = f"{decoding.capitalize()} responses"
        paired = [
            [
                f"{one['policy']} - {one['other']}",
                one["number"],
                f"{one['difference']:+z.3f}{interval(one['interval'])}",
                f"{number(one['win_rate'])}{interval(one['win_interval'])}",
                number(one["ties"]),
            ]
            for one in content["comparisons"]
            if one["decoding"] == decoding and is_shown(one["number"])
        ]
        heads = ["policies", "number", "difference [95%]", "win rate [95%]", "ties"]
        tables[decoding] = Table(title=title, columns=["", *policies], rows=rows)
        tables[f"{decoding}, paired"] = Table(title=f"{title}, paired", columns=heads, rows=paired)
    if passed:
        title = "Sampled responses, pass@k"
        tables["pass@k"] = Table(title=title, columns=["", *policies], rows=passed)
    return tables
