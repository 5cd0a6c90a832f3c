"""Terminal output for the batch of SFT or reward modelling at which a run ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lightning_rlhf.core.wording import counted
from lightning_rlhf.data.last_batch import ROW_FACTS, TEXTS, LastBatch
from lightning_rlhf.data.lengths import DemonstrationTokens
from lightning_rlhf.report.token_text import marked, scale, signed

LEGEND: Mapping[str, Mapping[str, str]] = {
    "sft": {
        "loss": "of the row by itself, nats per token; of a token -log p",
        "gradient norm": "of that loss, before clipping",
    },
    "rm": {
        "loss": "of the pair by itself",
        "gradient norm": "of that loss, before clipping",
        "chosen, rejected": "the scores, mean over the heads",
    },
    "dpo": {
        "loss": "of the pair by itself, with the SFT term",
        "gradient norm": "of that loss, before clipping",
        "chosen, rejected": "the implicit rewards, beta times the log-ratio to the reference",
    },
}
NAMED = 8
LOOKS = "a token is red where its loss is not finite, bold from half of the largest on"


@dataclass(frozen=True, kw_only=True)
class ReplayedRow:
    """One row of the batch and its recomputed numbers."""

    place: str
    """Place of the row in its source, for example "line 17"."""
    facts: Mapping[str, float]
    """Numbers of the row by name: loss, grad_norm, and others of the stage."""
    prompt: str
    tokens: Mapping[str, Sequence[str]]
    """Tokens after the prompt as text, by name: response; or chosen and rejected."""
    losses: Sequence[float]
    """Cross-entropy of each token of a response, nats; empty for a pair."""

    @property
    def is_finite(self) -> bool:
        """Return whether all numbers of the row are finite, as an update needs."""
        return all(map(math.isfinite, self.facts.values()))


def replayed_rows(
    batch: LastBatch, facts: Mapping[str, Tensor], show: Callable[[Sequence[int]], str]
) -> list[ReplayedRow]:
    """Return the rows of the batch with their recomputed numbers.

    facts: name -> one number a row. show: function that returns tokens as text.
    """
    numbers = {name: facts[name].tolist() for name in ROW_FACTS[batch.stage]}
    losses = iter((-facts["logprobs"]).tolist() if "logprobs" in facts else [])
    rows = []
    for i, example in enumerate(batch.examples):
        sides = {name: getattr(example, name) for name in TEXTS[batch.stage]}
        prompt = sides.pop("prompt")
        targets = example.targets if isinstance(example, DemonstrationTokens) else 0
        of_tokens = [next(losses) for _ in range(targets)]
        rows.append(
            ReplayedRow(
                place=f"{batch.unit} {batch.numbers[i]}",
                facts={name: column[i] for name, column in numbers.items()},
                prompt=show(list(prompt)),
                tokens={name: [show([token]) for token in ids] for name, ids in sides.items()},
                losses=of_tokens[-len(sides["response"]) :] if targets else [],
            )
        )
    return rows


def rows_on_terminal(
    batch: LastBatch, rows: Sequence[ReplayedRow], count: int
) -> Iterator[RenderableType]:
    """Yield the `count` rows of the largest loss token by token; rows not finite come first."""
    shown = sorted(rows, key=_rank)[:count]
    largest = scale([loss for row in shown for loss in row.losses])
    for row in shown:
        yield Text(f"\n{heading(row)}", style="bold")
        yield Text(marked(row.prompt), style="dim")
        yield _table(row, largest)
    order = "first those that are not finite, then from the largest loss down"
    yield Text(f"shown: {len(shown)} of {len(rows)} rows: {order}", style="dim")
    if batch.stage == "sft":
        yield Text(f"colours: {LOOKS}", style="dim")
    for name, meaning in LEGEND[batch.stage].items():
        yield Text(f"{name}: {meaning}", style="dim")


def _rank(row: ReplayedRow) -> float:
    return -row.facts["loss"] if row.is_finite else -math.inf


def heading(row: ReplayedRow) -> str:
    """Return the numbers of a row in one line."""
    facts = row.facts
    parts = [f"{row.place}: loss {facts['loss']:.4f}", f"gradient norm {facts['grad_norm']:.4g}"]
    parts += [f"{side} {signed(facts[f'{side}_score'])}" for side in row.tokens if not row.losses]
    return ", ".join(
        [*parts, *(f"{name} {counted(len(ids), 'token')}" for name, ids in row.tokens.items())]
    )


def _table(row: ReplayedRow, largest: float) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for name in row.tokens:
        table.add_column(name, overflow="fold")
    if not row.losses:
        for cells in zip_longest(*row.tokens.values()):
            table.add_row(*(Text("" if cell is None else repr(cell)) for cell in cells))
        return table
    table.add_column("loss", justify="right", no_wrap=True)
    for token, loss in zip(row.tokens["response"], row.losses, strict=True):
        is_large = loss > largest / 2
        style = "bold" if is_large and math.isfinite(loss) else "default"
        style = style if math.isfinite(loss) else "red"
        table.add_row(Text(repr(token), style=style), Text(f"{loss:.4f}", style=style))
    return table


def not_finite_rows(batch: LastBatch, rows: Sequence[ReplayedRow]) -> str:
    """Return in one line which rows are not finite; the first NAMED by their numbers."""
    bad = [
        f"{row.place} (loss {row.facts['loss']:g}, gradient norm {row.facts['grad_norm']:g})"
        for row in rows
        if not row.is_finite
    ]
    text = f"step {batch.step} was not made: of {counted(len(rows), 'row')} of {batch.source} "
    if not bad:
        return f"{text}each by itself has a finite loss and gradient"
    if len(bad) == len(rows) > 1:
        return (
            f"step {batch.step} was not made: all {len(rows)} rows of {batch.source} are not "
            f"finite: the weights, not the data; the first is {bad[0]}"
        )
    parts = bad[:NAMED] + [f"{len(bad) - NAMED} more"] * (len(bad) > NAMED)
    return f"{text}{len(bad)} {'is' if len(bad) == 1 else 'are'} not finite: {', '.join(parts)}"
