"""Evaluation of policies: tables for the console and evaluation.md, evaluation.json, samples."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lightning_rlhf.core.errors import counted
from lightning_rlhf.core.metrics import PASS
from lightning_rlhf.io.console import json_line, visible_line
from lightning_rlhf.report.comparison import DECODINGS, Comparison, Decoding, PolicySamples
from lightning_rlhf.report.estimates import Interval
from lightning_rlhf.report.tables import ABSENT, plain, spread, table, verdict_lines

PAGE, NUMBERS, SAMPLES = "evaluation.md", "evaluation.json", "samples.jsonl"
CHARACTERS = 600
"""Largest number of characters of a response or prompt in evaluation.md."""
LABELS: Mapping[str, str] = {
    "eval/reward_mean": "reward",
    "eval/kl": "KL to the SFT model, nats a response",
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
                found["eval/reward_gain"] = one.difference
                found |= _ends("eval/reward_gain", one.interval)
                assert one.win_rate is not None
                found["eval/win_rate"] = one.win_rate
                found |= _ends("eval/win_rate", one.win_interval)
        return {name: x for name, x in found.items() if math.isfinite(x)}

    def policy_rows(self, decoding: Decoding) -> list[list[str]]:
        """Return a row for each number but pass@k, with a cell for each policy after the label."""
        names = [name for name in self._names(decoding) if not name.startswith(PASS)]
        ordered = [*(n for n in LABELS if n in names), *(n for n in names if n not in LABELS)]
        return self._rows(decoding, ordered)

    def pass_rows(self) -> list[list[str]]:
        """Return a row for each pass@k of the sampled responses, as `policy_rows`."""
        return self._rows("sampled", [n for n in self._names("sampled") if n.startswith(PASS)])

    def _names(self, decoding: Decoding) -> list[str]:
        found = (self.numbers[decoding][policy.name] for policy in self.policies)
        return list(dict.fromkeys(name for column in found for name in column))

    def _rows(self, decoding: Decoding, names: Sequence[str]) -> list[list[str]]:
        columns = [self.numbers[decoding][policy.name] for policy in self.policies]
        return [
            [
                LABELS[name] if name in LABELS else name.removeprefix("eval/"),
                *(f"{column[name]:z.3f}" if name in column else ABSENT for column in columns),
            ]
            for name in names
        ]

    def comparison_rows(self, decoding: Decoding) -> list[list[str]]:
        """Return a row for each comparison: policies, number, difference, win rate and ties."""
        return [
            [
                f"{one.policy} - {one.other}",
                one.number,
                f"{one.difference:+z.3f}{_interval(one.interval)}",
                _rate(one.win_rate) + _interval(one.win_interval, 2),
                _rate(one.ties),
            ]
            for one in self.comparisons
            if one.decoding == decoding
        ]  # fmt: skip

    def tables(self) -> Iterator[Table]:
        """Yield tables for the console."""
        heading = ["", *(p.name for p in self.policies)]
        for decoding in DECODINGS:
            title = f"{decoding.capitalize()} responses"
            yield _console(title, heading, self.policy_rows(decoding))
        if rows := [row for row in self.pass_rows() if _is_brief(row[0].partition("/")[2])]:
            yield _console("Sampled responses, pass@k", heading, rows)
        rows = [row for row in self.comparison_rows("sampled") if _is_brief(row[1])]
        last = _console("Sampled responses, paired", HEADING, rows)
        last.caption, last.caption_justify = verdict_lines(self.about["verdicts"]), "left"
        yield last

    def logged(self) -> dict[str, tuple[Sequence[str], Sequence[Sequence[Any]]]]:
        """Return the tables for loggers, columns and rows by name."""
        names = [p.name for p in self.policies]
        return {
            "evaluation": (
                ("policy", "decoding", "number", "value"),
                [
                    (name, decoding, number, value)
                    for decoding in DECODINGS
                    for name in names
                    for number, value in _finite(self.numbers[decoding][name]).items()
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
        numbers = {
            "metrics": self.metrics,
            **self.about,
            "policies": {
                policy.name: {d: _finite(self.numbers[d][policy.name]) for d in DECODINGS}
                for policy in self.policies
            },
            "comparisons": [asdict(one) for one in self.comparisons],
        }
        (folder / NUMBERS).write_text(
            json.dumps(numbers, indent=2, default=vars) + "\n", encoding="utf-8"
        )
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
        prompts, names = self.about["prompts"], [plain(p.name, CHARACTERS) for p in self.policies]
        sections = [
            f"# {plain(self.title, CHARACTERS)}",
            f"Measured on {counted(prompts, 'held-out prompt')}, with "
            f"{counted(self.about['samples_per_prompt'], 'sampled response')} and one greedy "
            f"response to each; temperature {self.about['temperature']:g}.",
            *(
                plain(f"Reward {name}: {verdict.words}", CHARACTERS)
                for name, verdict in self.about["verdicts"].items()
            ),
        ]
        for decoding in DECODINGS:
            columns = list(range(1, len(names) + 1))
            rows = [_escaped(row) for row in self.policy_rows(decoding)]
            compared = [_escaped(row) for row in self.comparison_rows(decoding)]
            sections += [
                f"## {decoding.capitalize()} responses",
                table(["", *names], rows, columns),
                table(HEADING, compared, (2, 3, 4)),
            ]
        if passed := self.pass_rows():
            rows = [_escaped(row) for row in passed]
            sections += ["## pass@k", table(["", *names], rows, range(1, len(names) + 1))]
        sections += ["## Side by side", *self._examples(shown), "## What the numbers are"]
        return "\n\n".join([*sections, plain(DEFINITIONS, len(DEFINITIONS))]) + "\n"

    def _examples(self, shown: int) -> Iterator[str]:
        greedy = [row for row in self.side_by_side() if row["decoding"] == "greedy"]
        for row in spread(greedy, shown):
            yield f"**{plain(row['prompt'], CHARACTERS)}**"
            yield table(
                ["policy", "greedy response", "reward", "judge"],
                [
                    [
                        plain(name, CHARACTERS),
                        plain(sample["response"], CHARACTERS),
                        f"{sample['score']:+z.2f}",
                        plain(_verdict(sample["judge"]), CHARACTERS),
                    ]
                    for name, sample in row["responses"].items()
                ],
                (2,),
            )


JUDGED = "judge/"
"""Prefix of the parts of the judge's verdict, of which the console shows pass@k and comparisons for
gold alone."""
HEADING = ("policies", "number", "difference [95%]", "win rate [95%]", "ties")
"""Heading of the table of comparisons."""


def _console(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    found = Table(title=title, title_justify="left")
    for i, name in enumerate(heading):
        found.add_column(Text(visible_line(name)), justify="left" if i == 0 else "right")
    for row in rows:
        found.add_row(*(Text(visible_line(cell)) for cell in row))
    return found


def _escaped(row: Sequence[str]) -> list[str]:
    return [plain(cell, CHARACTERS) for cell in row]


def _finite(found: Mapping[str, float]) -> dict[str, float | None]:
    return {name: x if math.isfinite(x) else None for name, x in found.items()}


def _ends(name: str, interval: Interval | None) -> dict[str, float]:
    return {} if interval is None else {f"{name}_low": interval[0], f"{name}_high": interval[1]}


def _is_brief(number: str) -> bool:
    return not number.startswith(JUDGED) or number == f"{JUDGED}gold"


def _rate(found: float | None) -> str:
    return ABSENT if found is None else f"{found:.2f}"


def _interval(found: Interval | None, digits: int = 3) -> str:
    return "" if found is None else f" [{found[0]:z.{digits}f}, {found[1]:z.{digits}f}]"


def _verdict(judge: Mapping[str, float | None]) -> str:
    return ", ".join(f"{part} {x:z.2f}" for part, x in judge.items() if x is not None) or ABSENT
