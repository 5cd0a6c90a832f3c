"""Evaluation of policies: tables for the console and evaluation.md, evaluation.json, samples."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from lightning_rlhf.core.errors import counted
from lightning_rlhf.core.metrics import JUDGE, PASS, label_of
from lightning_rlhf.io.console import json_line
from lightning_rlhf.report.comparison import DECODINGS, PolicySamples
from lightning_rlhf.report.estimates import interval_text, number_text
from lightning_rlhf.report.tables import ABSENT, Table, plain, spread, table, verdict_lines

PAGE, NUMBERS, SAMPLES = "evaluation.md", "evaluation.json", "samples.jsonl"
CHARACTERS = 600
"""Largest number of characters of a response or prompt in evaluation.md."""
DEFINITIONS = (
    "Greedy responses take the most probable token each time; the others are sampled, with "
    "the same random numbers for every policy, so that differences are paired. A difference "
    "is the mean over prompts of the difference of two policies' means over responses; its "
    "95% interval is a studentised bootstrap over prompts. The win rate is the share of "
    "responses that score above the other policy's response to the same prompt with the same "
    "random numbers, a tie counting one half; its 95% interval is a percentile bootstrap over"
    " the prompts and three more: one won, one tied, one lost. KL is the mean over sampled "
    "responses of the sum over tokens of log p - log p_SFT at the sampling temperature. "
    "Perplexity of the demonstrations is exp of the mean loss over the response tokens of "
    "held-out demonstrations; that of the responses is exp of minus the mean log-probability "
    "that the SFT model, at the sampling temperature, gives their tokens. The shares of different "
    "words and pairs of words (distinct-1, distinct-2) are the number of different ones divided by "
    "the number of all, over all responses. pass@k, for scores of 0 and 1 alone, is "
    "1 - C(n - c, k) / C(n, k) for n responses of which c pass, averaged over prompts. The KL of "
    "the best of n, which has no log-probability, is estimated from the scores s of the SFT "
    "model's responses to a prompt, as "
    "sum over s of w log(w / p) with p the share of s and w = P(x <= s)^n - P(x < s)^n; it is at "
    "most log n - (n - 1) / n, which only scores without ties reach."
)
"""Definitions of the numbers."""


def write_evaluation(
    folder: Path,
    title: str,
    content: Mapping[str, Any],
    policies: Sequence[PolicySamples],
    shown: int,
) -> None:
    """Write evaluation.md, evaluation.json and samples.jsonl.

    content: of evaluation.json; policies: as in it; shown: number of prompts in evaluation.md.
    """
    numbers = json.dumps(content, indent=2, default=vars) + "\n"
    (folder / NUMBERS).write_text(numbers, encoding="utf-8")
    rows = list(side_by_side(policies))
    lines = "".join(json_line(row) + "\n" for row in rows)
    (folder / SAMPLES).write_text(lines, encoding="utf-8")
    sections = [
        f"# {plain(title, CHARACTERS)}",
        f"Measured on {counted(content['prompts'], 'held-out prompt')}, with "
        f"{counted(content['samples_per_prompt'], 'sampled response')} and one greedy "
        f"response to each; temperature {content['temperature']:g}.",
    ]
    for name, verdict in content["verdicts"].items():
        sections.append(plain(f"Reward {name}: {verdict.words}", CHARACTERS))
    for name, found in evaluation_tables(content).items():
        is_paired = name.endswith("paired")
        if not is_paired:
            sections.append("## pass@k" if name == "pass@k" else f"## {found.title}")
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


def side_by_side(policies: Sequence[PolicySamples]) -> Iterator[dict[str, Any]]:
    """Yield a row for each response: the prompt, and what each policy responds to it."""
    for decoding in DECODINGS:
        for samples in zip(*(p.samples[decoding] for p in policies), strict=True):
            yield {
                "index": samples[0]["index"],
                "prompt": samples[0]["prompt"],
                "decoding": decoding,
                "responses": {
                    policy.name: {k: x for k, x in s.items() if k not in ("index", "prompt")}
                    for policy, s in zip(policies, samples, strict=True)
                },
            }


def console_tables(content: Mapping[str, Any]) -> Iterator[RichTable]:
    """Yield tables for the console."""
    tables = evaluation_tables(content, is_brief=True)
    for name in ("sampled", "greedy", "pass@k", "sampled, paired"):
        if name in tables:
            found = tables[name].console()
            if name.endswith("paired"):
                found.caption = verdict_lines(content["verdicts"])
            yield found


def logged_tables(
    content: Mapping[str, Any], policies: Sequence[PolicySamples]
) -> dict[str, tuple[Sequence[str], Sequence[Sequence[Any]]]]:
    """Return the tables for loggers, columns and rows by name."""
    names, comparisons = list(content["policies"]), content["comparisons"]
    return {
        "evaluation": (
            ("policy", "decoding", "number", "value"),
            [
                (name, decoding, number, value)
                for decoding in DECODINGS
                for name in names
                for number, value in content["policies"][name][decoding].items()
            ],
        ),
        "comparisons": (list(comparisons[0]), [list(one.values()) for one in comparisons]),
        "side_by_side": (
            ("prompt", "decoding", *names),
            [
                (r["prompt"], r["decoding"], *(r["responses"][n]["response"] for n in names))
                for r in side_by_side(policies)
            ],
        ),
    }


def evaluation_tables(content: Mapping[str, Any], *, is_brief: bool = False) -> dict[str, Table]:
    """Return the tables of an evaluation of policies, for the console and the pages.

    content: of evaluation.json.
    is_brief: whether pass@k and comparisons are those of scores and the gold part of the judge.
    Returns: "sampled", "sampled, paired", the same of "greedy", and "pass@k" where there is any.
    """
    policies: Mapping[str, Mapping[str, Mapping[str, float | None]]] = content["policies"]
    tables: dict[str, Table] = {}
    passed: list[list[str]] = []

    def is_shown(number: str) -> bool:
        return not is_brief or number == "judge/gold" or not number.startswith("judge/")

    for decoding in DECODINGS:
        columns = [found.get(decoding, {}) for found in policies.values()]
        rows: list[list[str]] = []
        for name in dict.fromkeys(name for column in columns for name in column):
            label = name if name.startswith(JUDGE) else label_of(name).removeprefix("the ")
            label = label.removeprefix("eval/").removesuffix(" on held-out prompts")
            row = [label, *(number_text(column.get(name)) for column in columns)]
            if not name.startswith(PASS):
                rows.append(row)
            elif is_shown(label.partition("/")[2]):
                passed.append(row)
        title = f"{decoding.capitalize()} responses"
        tables[decoding] = Table(title=title, columns=["", *policies], rows=rows)
        tables[f"{decoding}, paired"] = Table(
            title=f"{title}, paired",
            columns=["policies", "number", "difference [95%]", "win rate [95%]", "ties"],
            rows=[
                [
                    f"{one['policy']} - {one['other']}",
                    one["number"],
                    f"{one['difference']:+z.3f}{interval_text(one['interval'])}",
                    _rate(one["win_rate"]) + interval_text(one["win_interval"], 2),
                    _rate(one["ties"]),
                ]
                for one in content["comparisons"]
                if one["decoding"] == decoding and is_shown(one["number"])
            ],
        )
    if passed:
        title = "Sampled responses, pass@k"
        tables["pass@k"] = Table(title=title, columns=["", *policies], rows=passed)
    return tables


def _rate(found: float | None) -> str:
    return ABSENT if found is None else f"{found:.2f}"
