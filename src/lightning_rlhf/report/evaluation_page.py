"""Evaluation of policies: tables for the console and evaluation.md, evaluation.json, samples."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from lightning_rlhf.core.errors import counted
from lightning_rlhf.core.metrics import HELD_OUT, HELD_OUT_KL, PASS
from lightning_rlhf.io.console import json_line
from lightning_rlhf.report.comparison import DECODINGS, Comparison, Decoding, PolicySamples
from lightning_rlhf.report.estimates import interval_text, number_text
from lightning_rlhf.report.tables import ABSENT, Table, plain, spread, table, verdict_lines

PAGE, NUMBERS, SAMPLES = "evaluation.md", "evaluation.json", "samples.jsonl"
CHARACTERS = 600
"""Largest number of characters of a response or prompt in evaluation.md."""
LABELS: Mapping[str, str] = {
    HELD_OUT: "reward",
    HELD_OUT_KL: "KL to the SFT model, nats a response",
    "eval/best_of_kl_bound": "largest KL of best-of-n, nats a response",
    "eval/response_tokens": "response length, tokens",
    "eval/ended": "share that ended",
    "eval/perplexity": "perplexity of the demonstrations",
    "eval/response_perplexity": "perplexity of the responses under the SFT model",
    "eval/distinct_1": "distinct-1",
    "eval/distinct_2": "distinct-2",
}
"""Label of a number of a policy; other numbers have their own name."""
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
    "that the SFT model, at the sampling temperature, gives their tokens. Distinct-n is the "
    "number of different n-grams of words divided by the number of n-grams, over all "
    "responses. pass@k, for scores of 0 and 1 alone, is 1 - C(n - c, k) / C(n, k) for n "
    "responses of which c pass, averaged over prompts. The KL of the best of n, which has no "
    "log-probability, is estimated from the scores s of the SFT model's responses to a prompt, as "
    "sum over s of w log(w / p) with p the share of s and w = P(x <= s)^n - P(x < s)^n; it is at "
    "most log n - (n - 1) / n, which only scores without ties reach."
)
"""Definitions of the numbers."""


GOLD_ALONE = ("judge/", "judge/gold")
"""Prefix of the parts of the judge's verdict, and the one of which the console shows pass@k and
comparisons."""


@dataclass(frozen=True, kw_only=True)
class PolicyReport:
    """All that the evaluation of policies found."""

    title: str
    about: Mapping[str, Any]
    """Settings of the evaluation: number of prompts, of samples, temperature, seed, sources, and
    the fitness reports' verdicts on the reward, by component."""
    policies: Sequence[PolicySamples]
    """The SFT model, then the policies in the order given."""
    numbers: Mapping[Decoding, Mapping[str, Mapping[str, float]]]
    """Decoding -> policy -> metric -> number."""
    comparisons: Sequence[Comparison]

    @property
    def metrics(self) -> dict[str, float]:
        """Return the numbers of the first policy and how it compares with the SFT model, by metric.

        Sampled responses count; numbers that are not finite are left out.
        """
        sft, policy = (p.name for p in self.policies[:2])
        found = dict(self.numbers["sampled"][policy])
        for one in self.comparisons:
            if (one.policy, one.other, one.decoding, one.number) == (
                policy, sft, "sampled", "reward",
            ):  # fmt: skip
                assert one.win_rate is not None
                for name, value, interval in (
                    ("eval/reward_gain", one.difference, one.interval),
                    ("eval/win_rate", one.win_rate, one.win_interval),
                ):
                    found[name] = value
                    if interval is not None:
                        found[f"{name}_low"], found[f"{name}_high"] = interval
        return {name: x for name, x in found.items() if math.isfinite(x)}

    def content(self) -> dict[str, Any]:
        """Return the content of evaluation.json."""
        return {
            "metrics": self.metrics,
            **self.about,
            "policies": {
                p.name: {
                    d: {n: x if math.isfinite(x) else None for n, x in row[p.name].items()}
                    for d, row in self.numbers.items()
                }
                for p in self.policies
            },
            "comparisons": [asdict(one) for one in self.comparisons],
        }

    def console(self) -> Iterator[RichTable]:
        """Yield tables for the console."""
        tables = evaluation_tables(self.content(), is_brief=True)
        last = tables.pop("sampled, paired")
        for name in ("sampled", "greedy", "pass@k"):
            if name in tables:
                yield tables[name].console()
        paired = last.console()
        paired.caption, paired.caption_justify = verdict_lines(self.about["verdicts"]), "left"
        yield paired

    def logged(self) -> dict[str, tuple[Sequence[str], Sequence[Sequence[Any]]]]:
        """Return the tables for loggers, columns and rows by name."""
        names, policies = [p.name for p in self.policies], self.content()["policies"]
        return {
            "evaluation": (
                ("policy", "decoding", "number", "value"),
                [
                    (name, decoding, number, value)
                    for decoding in DECODINGS
                    for name in names
                    for number, value in policies[name][decoding].items()
                ],
            ),
            "comparisons": (
                [field.name for field in fields(Comparison)],
                [list(asdict(one).values()) for one in self.comparisons],
            ),
            "side_by_side": (
                ("prompt", "decoding", *names),
                [
                    (r["prompt"], r["decoding"], *(r["responses"][n]["response"] for n in names))
                    for r in self.side_by_side()
                ],
            ),
        }

    def write(self, folder: Path, shown: int) -> None:
        """Write evaluation.md, evaluation.json and samples.jsonl; shown: prompts in the first."""
        (folder / PAGE).write_text(self.page(shown), encoding="utf-8")
        numbers = json.dumps(self.content(), indent=2, default=vars) + "\n"
        (folder / NUMBERS).write_text(numbers, encoding="utf-8")
        lines = (json_line(row) + "\n" for row in self.side_by_side())
        (folder / SAMPLES).write_text("".join(lines), encoding="utf-8")

    def side_by_side(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each response: the prompt, and what each policy responds to it."""
        for decoding in DECODINGS:
            for samples in zip(*(p.samples[decoding] for p in self.policies), strict=True):
                yield {
                    "index": samples[0]["index"],
                    "prompt": samples[0]["prompt"],
                    "decoding": decoding,
                    "responses": {
                        policy.name: {k: x for k, x in s.items() if k not in ("index", "prompt")}
                        for policy, s in zip(self.policies, samples, strict=True)
                    },
                }

    def page(self, shown: int) -> str:
        """Return evaluation.md."""
        sections = [
            f"# {plain(self.title, CHARACTERS)}",
            f"Measured on {counted(self.about['prompts'], 'held-out prompt')}, with "
            f"{counted(self.about['samples_per_prompt'], 'sampled response')} and one greedy "
            f"response to each; temperature {self.about['temperature']:g}.",
            *(
                plain(f"Reward {name}: {verdict.words}", CHARACTERS)
                for name, verdict in self.about["verdicts"].items()
            ),
        ]
        for name, found in evaluation_tables(self.content()).items():
            is_paired = name.endswith("paired")
            if not is_paired:
                sections.append("## pass@k" if name == "pass@k" else f"## {found.title}")
            sections.append(found.markdown(CHARACTERS, (2, 3, 4) if is_paired else None))
        sections += ["## Side by side", *self._examples(shown), "## What the numbers are"]
        return "\n\n".join([*sections, plain(DEFINITIONS, len(DEFINITIONS))]) + "\n"

    def _examples(self, shown: int) -> Iterator[str]:
        greedy = [row for row in self.side_by_side() if row["decoding"] == "greedy"]
        for row in spread(greedy, shown):
            yield f"**{plain(row['prompt'], CHARACTERS)}**"
            rows = []
            for name, sample in row["responses"].items():
                judge = [f"{p} {x:z.2f}" for p, x in sample["judge"].items() if x is not None]
                texts = (name, sample["response"], ", ".join(judge) or ABSENT)
                policy, response, judged = (plain(text, CHARACTERS) for text in texts)
                rows.append((policy, response, f"{sample['score']:+z.2f}", judged))
            yield table(["policy", "greedy response", "reward", "judge"], rows, (2,))


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
        return not (is_brief and number.startswith(GOLD_ALONE[0]) and number != GOLD_ALONE[1])

    for decoding in DECODINGS:
        columns = [found.get(decoding, {}) for found in policies.values()]
        names = list(dict.fromkeys(name for column in columns for name in column))
        rows = []
        for name in [*(n for n in LABELS if n in names), *(n for n in names if n not in LABELS)]:
            label = LABELS.get(name, name.removeprefix("eval/"))
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
