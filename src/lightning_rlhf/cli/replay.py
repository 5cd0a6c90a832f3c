"""lightning-rlhf replay: shows a recorded iteration of PPO token by token."""

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich import get_console
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from lightning_rlhf.core.errors import DataError, counted
from lightning_rlhf.core.validation import PositiveInt, check_value
from lightning_rlhf.data.rollouts import FOLDER, file_of, read_recorded, recorded_iterations
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.io.user_code import nearest_path
from lightning_rlhf.report.run_page import StageReport, part, token_part, write_page
from lightning_rlhf.report.tables import marked, scale, with_sign

Row = Mapping[str, Any]
"""A recorded response, as `data.rollouts.read_recorded` returns it."""
COLUMNS = {
    "advantages": ("advantage", "above 0 the update makes the token likelier, below 0 less likely"),
    "kl": ("KL", "log-probability of the policy less the reference's, nats; of a response the sum"),
    "rewards": ("reward", "KL penalty, and at the last token the score"),
    "returns": ("return", "target of the critic"),
    "values": ("value", "what the critic expected from there on"),
}
"""Column of the file -> its heading in the table of a response and its meaning; `values` is there
only with a critic."""


def replay(arguments: Sequence[str]) -> None:
    """Print responses of a recorded iteration of a run, and write them to a page in its folder.

    Raises DataError where it is not recorded or its file is damaged.
    """
    given = parser().parse_args(arguments)
    check_value("--iteration", given.iteration, PositiveInt | None)
    check_value("--responses", given.responses, PositiveInt)
    folder = Path(given.run)
    recorded = recorded_iterations(folder)
    if not recorded:
        hint = "" if folder.is_dir() else nearest_path(str(folder))
        raise DataError(
            f"{folder / FOLDER} holds no recorded iteration{hint}; record=true writes them while "
            "stage=ppo runs"
        )
    iteration = given.iteration or recorded[-1]
    if iteration not in recorded:
        raise DataError(
            f"iteration {iteration} of {folder} is not recorded; allowed: one of "
            f"{', '.join(map(str, recorded))}"
        )
    rows = read_recorded(file_of(folder, iteration))
    shown = sorted(enumerate(rows), key=rank)[: given.responses]
    note = (
        f"{len(shown)} of {counted(len(rows), 'response')}: first those with a number that is not "
        "finite, then from the largest sum of |advantage| down"
    )
    print_responses(shown)
    print_line(f"shown: {note}", "dim")
    responses = []
    for number, row in shown:
        names, cells = table_of(row)
        responses.append(
            {"heading": heading(number, row), "prompt": row["prompt"], "text": row["token_texts"],
             "advantage": row["advantages"], "kl": row["kl"], "names": names, "rows": cells}
        )  # fmt: skip
    sections = [
        ("", Markup("<p>{}.</p>").format(note) + token_part(responses)),
        ("Numbers of a token", part("table", list(COLUMNS.values()))),
    ]
    path = folder / f"replay_{iteration}.html"
    with written_whole(path) as beside:
        write_page(beside, f"Iteration {iteration} of {folder}", [StageReport(sections=sections)])
    print_line(f"page: {path}")


def rank(numbered: tuple[int, Row]) -> float:
    """Return the sort key of a response, lowest first: not finite, then by |advantage|."""
    _, row = numbered
    numbers = [row["score"], *chain(*(row[name] for name in COLUMNS if name in row))]
    return -sum(map(abs, row["advantages"])) if all(map(math.isfinite, numbers)) else -math.inf


def heading(number: int, row: Row) -> str:
    """Return the numbers of a whole response in one line; number: its row in the file, from 0."""
    parts = [f"{name} {with_sign(part)}" for name, part in row["parts"].items()]
    return ", ".join(
        [
            f"response {number}: score {with_sign(row['score'])}",
            *(parts if len(parts) > 1 else []),
            counted(len(row["token_texts"]), "token"),
            "ended" if row["ended"] else "cut off",
            f"KL {with_sign(sum(row['kl']))} nats",
        ]
    )


def table_of(row: Row) -> tuple[list[str], list[list[str]]]:
    """Return the headings of a response's table, and the cells of each of its tokens."""
    names = [name for name in COLUMNS if name in row]
    columns = [map(repr, row["token_texts"]), *(map(with_sign, row[name]) for name in names)]
    headings = ["token", *(COLUMNS[name][0] for name in names)]
    return headings, [list(cells) for cells in zip(*columns, strict=True)]


def print_responses(shown: Sequence[tuple[int, Row]]) -> None:
    """Print each response's prompt, its tokens coloured by advantage, and their numbers.

    A legend of the numbers comes last, next to the cursor.
    """
    show = get_console().print
    largest = scale([x for _, row in shown for x in row["advantages"]])
    for number, row in shown:
        show(Text(f"\n{marked(heading(number, row))}", style="bold"))
        show(Text(marked(row["prompt"]), style="dim"))
        styles = [
            f"{'green' if x > 0 else 'red' if x < 0 else 'default'}"
            f"{' bold' if abs(x) > largest / 2 else ''}"
            for x in row["advantages"]
        ]
        show(Text.assemble(*zip(map(marked, row["token_texts"]), styles, strict=True)))
        names, rows = table_of(row)
        table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(names[0], overflow="fold")
        for name in names[1:]:
            table.add_column(name, justify="right", no_wrap=True)
        for (token, *numbers), of_token in zip(rows, styles, strict=True):
            table.add_row(Text(marked(token), style=of_token), *numbers)
        show(table)
    show(Text("green: advantage above 0, red: below, bold from half of the largest on", "dim"))
    for name, meaning in COLUMNS.values():
        show(Text(f"{name}: {meaning}", style="dim"))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf replay",
        description="Show a recorded iteration of stage=ppo record=true token by token: here and "
        "in replay_N.html in the run folder. It reads the files of the iteration alone.",
    )
    parser.add_argument("run", help="folder of the run, as outputs/<run>/<model>/ppo")
    parser.add_argument(
        "--iteration", type=int, metavar="N",
        help="which, from 1 as in metrics.csv (the newest that is recorded)",
    )  # fmt: skip
    parser.add_argument(
        "--responses", type=int, default=3, metavar="K",
        help="how many to show, those first whose advantages are largest (%(default)s)",
    )  # fmt: skip
    return parser
