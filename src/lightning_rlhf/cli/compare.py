"""lightning-rlhf compare: several runs, or a sweep, on one page and in tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import get_console

from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.io.storage import full_disk_told, refuse_foreign, written_whole
from lightning_rlhf.stages.console import print_error, print_line


def compare(arguments: Sequence[str]) -> None:
    """Print the tables and write the page; exit with status 1 after an error."""
    given = parser().parse_args(arguments)
    out = Path(given.out)
    from lightning_rlhf.stages.compare import compare_runs  # which imports torch

    try:
        refuse_foreign(out, "page")
        found = compare_runs([Path(run) for run in given.runs], given.stage, fewest=2)
        for table in found.console():
            get_console().print(table)
        with full_disk_told(), written_whole(out, kind="page") as beside:
            found.write(beside, f"{found.stage}: {', '.join(given.runs)}")
        print_line(f"comparison: {out}")
    except RLHFError as error:
        print_error(str(error))
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf compare",
        description="Compare runs of a stage: means with intervals over seeds, overlaid curves, "
        "rewards at equal KL, and what differs in configuration. Runs that differ in their seed "
        "alone are one group.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN",
        help="folder of a run, or one above runs, as that of a sweep",
    )  # fmt: skip
    parser.add_argument("--stage", help="which runs to take, where there are several stages (ppo)")
    parser.add_argument("--out", default="compare.html", help="the page (%(default)s)")
    return parser
