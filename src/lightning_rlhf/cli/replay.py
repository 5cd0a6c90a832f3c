"""lightning-rlhf replay: shows a recorded iteration of PPO token by token."""

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

from lightning_rlhf.cli.arguments import Options, parse_command
from lightning_rlhf.core.errors import DataError, counted
from lightning_rlhf.core.validation import PositiveInt, check_value
from lightning_rlhf.data.rollouts import FOLDER, file_of, read_recorded, recorded_iterations
from lightning_rlhf.io import console, storage
from lightning_rlhf.report.run_page import StageReport, part, token_part, write_page
from lightning_rlhf.report.tables import marked, scale, with_sign

OPTIONS: Options = {
    "run": {"help": "folder of the run, as outputs/<run>/<model>/ppo"},
    "--iteration": {"type": int, "metavar": "N", "help": "from 1 (the newest that is recorded)"},
    "--responses": {"type": int, "default": 3, "metavar": "K", "help": "how many (%(default)s)"},
}
COLUMNS = {
    "advantages": ("advantage", "above 0 the update makes the token likelier, below 0 less likely"),
    "kl": ("KL", "log-probability of the policy less the reference's, nats; of a response the sum"),
    "rewards": ("reward", "KL penalty, and the score at the last token or where its parts end"),
    "returns": ("return", "target of the critic"),
    "values": ("value", "what the critic expected from there on"),
}
"""Column of the file -> its heading in the table of a response and its meaning; `values` is there
only with a critic."""


def replay(arguments: Sequence[str]) -> None:
    """Show a recorded iteration of stage=ppo record=true token by token, here and in replay_N.html
    in the run folder. It reads the file of the iteration alone.

    Raises DataError where it is not recorded or its file is damaged.
    """
    given = parse_command(replay, arguments, OPTIONS)
    check_value("--responses", given.responses, PositiveInt)
    check_value("--iteration", given.iteration, PositiveInt | None)
    folder, recorded = Path(given.run), recorded_iterations(Path(given.run))
    iteration = given.iteration or max(recorded, default=0)
    if iteration not in recorded:
        raise DataError(
            f"iteration {iteration} of {folder} is not recorded; allowed: one of "
            f"{', '.join(map(str, recorded))} in {folder / FOLDER}, which stage=ppo record=true "
            "writes"
        )
    rows = read_recorded(file_of(folder, iteration))
    shown, ranks = [], []
    for row in rows:
        numbers = [row["score"], *chain(*(row[name] for name in COLUMNS if name in row))]
        is_finite = all(map(math.isfinite, numbers))
        ranks.append(-sum(map(abs, row["advantages"])) if is_finite else -math.inf)
    for number in sorted(range(len(rows)), key=ranks.__getitem__)[: given.responses]:
        row = rows[number]
        score, end = with_sign(row["score"]), "ended" if row["ended"] else "cut off"
        parts = [f"{name} {with_sign(x)}" for name, x in row["parts"].items()]
        heading = [f"response {number}: score {score}", *(parts if len(parts) > 1 else ())]
        heading += [counted(len(row["token_texts"]), "token"), end]
        heading += [f"KL {with_sign(sum(row['kl']))} nats"]
        names = [name for name in COLUMNS if name in row]
        columns = [map(repr, row["token_texts"]), *(map(with_sign, row[x]) for x in names)]
        response = {"heading": ", ".join(heading), "prompt": row["prompt"], "kl": row["kl"]}
        response |= {"text": row["token_texts"], "advantage": row["advantages"]}
        response["names"] = ["token", *(COLUMNS[name][0] for name in names)]
        shown.append(response | {"rows": [list(cells) for cells in zip(*columns, strict=True)]})
    note = (
        f"{len(shown)} of {counted(len(rows), 'response')}: first those with a number that is not "
        "finite, then from the largest sum of |advantage| down"
    )
    print_responses(shown)
    console.print_line(f"shown: {note}", "dim")
    sections = [
        ("", Markup("<p>{}.</p>").format(note) + token_part(shown)),
        ("Numbers of a token", part("table", list(COLUMNS.values()))),
    ]
    path = folder / f"replay_{iteration}.html"
    with storage.written_whole(path) as file:
        write_page(file, f"Iteration {iteration} of {folder}", [StageReport(sections=sections)])
    console.print_line(f"page: {path}")


def print_responses(shown: Sequence[Mapping[str, Any]]) -> None:
    """Print each response's prompt, its tokens coloured by advantage, and their numbers.

    A legend of the numbers comes last, next to the cursor.
    """
    show = get_console().print
    largest = scale([x for response in shown for x in response["advantage"]])
    for response in shown:
        show(Text(f"\n{marked(response['heading'])}", style="bold"))
        show(Text(marked(response["prompt"]), style="dim"))
        styles = [
            ("green" if x > 0 else "red" if x < 0 else "default") + " bold" * (abs(x) > largest / 2)
            for x in response["advantage"]
        ]
        show(Text.assemble(*zip(map(marked, response["text"]), styles, strict=True)))
        table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
        for name in response["names"]:
            is_text = name == "token"
            table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
        for (token, *numbers), style in zip(response["rows"], styles, strict=True):
            table.add_row(Text(marked(token), style=style), *numbers)
        show(table)
    show(Text("green: advantage above 0, red: below, bold from half of the largest on", "dim"))
    for name, meaning in COLUMNS.values():
        show(Text(f"{name}: {meaning}", style="dim"))
