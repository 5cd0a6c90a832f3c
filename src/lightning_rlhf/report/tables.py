"""Tables and texts of pages and of the console: Markdown, tokens in colours, the end of a run."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.core.metrics import BEFORE_AFTER, EVAL_PART, JUDGE, KL, label_of
from lightning_rlhf.io.console import visible, visible_line
from lightning_rlhf.io.storage import damaged_line, is_number, json_lines

ABSENT = "-"
Sample = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts, for the console, a Markdown file and a page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def console(self) -> RichTable:
        """Return the table for the console; columns but the first are right-aligned."""
        # Without a frame two numbers with their intervals fit 80 columns.
        found = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        found.title, found.title_justify = Text(visible_line(self.title)), "left"
        found.min_width = min(len(self.title), 79)
        found.caption, found.caption_justify = Text(self.note) if self.note else None, "left"
        for cell in self.columns:
            found.add_column(Text(visible_line(cell)), overflow="fold")
        for column in found.columns[1:]:
            column.justify = "right"
        for row in self.rows:
            found.add_row(*(Text(visible_line(cell)) for cell in row))
        return found

    def markdown(self, characters: int, right: Sequence[int] | None = None) -> str:
        """Return the table with its cells cut to so many characters and shown literally.

        right: places of right-aligned columns; None is all but the first.
        """
        lines = (self.columns, *self.rows)
        cells = [[plain(cell, characters) if cell else "" for cell in line] for line in lines]
        places = range(1, len(self.columns)) if right is None else right
        return table(cells[0], cells[1:], places)

    def html(self, kind: str = "numbers") -> Markup:
        """Return title, table and note; an interval may stand below its value on a phone.

        kind: classes of the style sheet.
        """
        heads = (Markup("<th>{}</th>").format(shown(cell)) for cell in self.columns)
        body = Markup("<tr>{}</tr>\n").format(Markup("").join(heads))
        interval, td = Markup(' <span class="interval">[{}</span>'), Markup("<td>{}{}</td>")
        for row in self.rows:
            split = (shown(cut(cell)).partition(" [") for cell in row)
            cells = (td.format(x, mark and interval.format(rest)) for x, mark, rest in split)
            body += Markup("<tr>{}</tr>\n").format(Markup("").join(cells))
        table = Markup('<div class="wide"><table class="{}">\n{}</table></div>\n')
        note = Markup('<p class="soft">{}</p>\n').format(shown(self.note))
        title = Markup("<h3>{}</h3>\n").format(shown(self.title))
        return title + (table.format(kind, body) if self.rows else "") + (note if self.note else "")


CHARACTERS = 2000
"""Largest number of characters of a text that a page shows."""


def shown(value: Any) -> Any:
    """Return a text with its hidden characters visible; markup as it is."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def cut(text: str, characters: int = CHARACTERS) -> str:
    """Return a text of at most so many characters."""
    return text if len(text) <= characters else text[: characters - 1] + "…"


def before_after_table(before: Mapping[str, float], after: Mapping[str, float]) -> RichTable:
    """Return a table of the SFT model's and PPO's metrics on the same held-out prompts."""
    parts = sorted(name for name in after if name.startswith((JUDGE, EVAL_PART)))
    rows = []
    for name in dict.fromkeys(name for name in (*BEFORE_AFTER, *parts) if name in after):
        label = label_of(name).removeprefix("the ").removesuffix(" on held-out prompts")
        start, change = ABSENT, ABSENT
        if name in before:
            start, change = f"{before[name]:z.2f}", f"{after[name] - before[name]:+z.2f}"
        rows.append([label.removeprefix("eval/"), start, f"{after[name]:z.2f}", change])
    columns = ["", "SFT", "after PPO", "change"]
    return Table(title="On held-out prompts", columns=columns, rows=rows).console()


NARROW = 60
"""Number of columns of a terminal below which samples are shown without their numbers."""


def samples_shown(pairs: Sequence[Mapping[str, str]], width: int) -> Text:
    """Return prompts with two responses each, every text cut to a line of `width` columns.

    pairs: `prompt`, `before` and `after`, and of both the name with the numbers.
    """
    lines = []
    for pair in pairs:
        for side, style in {"prompt": "bold", "before": "", "after": ""}.items():
            name, _, numbers = pair.get(f"{side}_numbers", side).partition(": ")
            name, numbers = f"  {name:13} ", f"  {numbers}" if numbers and width >= NARROW else ""
            text = Text(visible(" ".join(pair[side].split())) or "(empty)", style)
            text.truncate(width - len(name + numbers), overflow="ellipsis", pad=bool(numbers))
            lines.append(Text.assemble((name, "dim"), text, (numbers, "dim")))
    return Text("\n").join(lines)


def paired_samples(before_jsonl: Path, after_jsonl: Path, n: int) -> list[tuple[Sample, Sample]]:
    """Return the samples of two evaluations on `n` of the prompts.

    The choice depends on the two files alone: the prompts are spread evenly over those whose
    responses differ, or over all if none do; of several responses to a prompt it is the first that
    differs.

    Raises CheckpointError if a file is damaged.
    """
    before, after = _read(before_jsonl), _read(after_jsonl)
    if len(before) != len(after):
        raise CheckpointError(
            f"{after_jsonl} is damaged: it has {len(after)} samples, {before_jsonl} {len(before)}"
        )
    pairs = list(zip(before, after, strict=True))
    differing = [pair for pair in pairs if pair[0]["response"] != pair[1]["response"]]
    first: dict[str, tuple[Sample, Sample]] = {}
    for pair in differing or pairs:
        first.setdefault(pair[0]["prompt"], pair)
    return spread(list(first.values()), n)


def spread(items: Sequence[Any], n: int) -> list[Any]:
    """Return `n` items at even distances, or all of them if there are no more."""
    if len(items) <= n:
        return list(items)
    return [items[i * len(items) // n] for i in range(n)]


def _read(path: Path) -> list[Sample]:
    """Return the samples of an evaluation. Raises CheckpointError if a line is not a sample."""
    samples: list[Sample] = []
    for number, (_, sample) in enumerate(json_lines(path), start=1):
        match sample:
            case {"prompt": str(), "response": str(), "score": score, "judge": {**parts}} if (
                is_number(score) and all(x is None or is_number(x) for x in parts.values())
            ):
                samples.append(sample)
            case _:
                raise damaged_line(path, number, "it is no sample of an evaluation")
    return samples


def score_text(sample: Sample) -> str:
    """Return the reward of a sample, after its gold score if it has one."""
    gold = sample["judge"].get("gold")
    return f"{'' if gold is None else f'gold {gold:+z.2f}, '}reward {sample['score']:+z.2f}"


_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&])")


def plain(text: str, characters: int) -> str:
    """Return `text` escaped, so that it is displayed literally, in one line.

    Runs of white space become one space. The text is cut to `characters` before Markdown's and
    HTML's special characters are escaped.
    """
    line = cut(visible(" ".join(text.split())), characters)
    return _SPECIAL.sub(r"\\\1", line) if line else "*(empty)*"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int]) -> str:
    """Return a table of cells that are already Markdown; the columns `right` are right-aligned."""
    rule = ["---:" if column in right else "---" for column in range(len(heading))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, rule, *rows))


GREEN, RED, ORANGE, BLUE = "0 160 80", "225 45 45", "225 125 0", "50 120 235"
"""Colours of a token: advantage above and below 0, KL above and below 0."""


def colour(share: float, above: str, below: str) -> str:
    """Return a translucent colour, readable on a light and on a dark page."""
    strength = min(1.0, abs(share)) if math.isfinite(share) else 0.0
    return f"rgb({above if share > 0 else below} / {0.55 * strength:.3f})"


def marked(text: str) -> str:
    """Return the visible text with its line breaks marked and kept."""
    return visible(text).replace("\n", "⏎\n")


def with_sign(number: float) -> str:
    """Return a number with its sign: three decimals, or six digits from a million on."""
    is_large = math.isfinite(number) and abs(number) >= 1e6
    return f"{number:+g}" if is_large else f"{number:+z.3f}"


def scale(numbers: Sequence[float]) -> float:
    """Return the largest finite absolute value; 1 where all are 0."""
    return max((abs(x) for x in numbers if math.isfinite(x)), default=0.0) or 1.0


FAR, SURE = 1.0, 0.01
"""KL divergence in nats a token above which the policy has collapsed, as its tokens are then on
average e times as likely as under the reference; and entropy in nats a token below which it has, as
it nearly always picks the same token."""


def collapsed(row: Mapping[str, float], stage: str = "ppo") -> str | None:
    """Return a description of the collapse that the last iteration's metrics show, or None.

    stage: name of the section whose keys the description names.

    A policy has collapsed if kl_divergence / response_tokens > FAR (or NaN), or entropy < SURE.
    """
    per_token = row[KL] / row["rollout/response_tokens"]
    found = []
    if not per_token <= FAR:  # true of NaN as well
        found.append(f"{KL} is {per_token:.3g} nats a token (above {FAR:g})")
    if not row.get("entropy", SURE) >= SURE:
        found.append(f"entropy is {row['entropy']:.3g} nats a token (below {SURE:g})")
    if not found:
        return None
    return (
        f"the policy has collapsed: {' and '.join(found)} in the last iteration. Look at samples/; "
        f"a smaller {stage}.lr, or a larger {stage}.kl_coef, keeps it near the SFT model"
    )
