"""lightning-rlhf report: report.html of a run that is there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.io.storage import full_disk_told
from lightning_rlhf.stages.console import print_error, print_line


def report(arguments: Sequence[str]) -> None:
    """Write the page and print its path; exit with status 1 after an error."""
    folder = Path(parser().parse_args(arguments).run)
    from lightning_rlhf.stages.reports import write_report  # which imports torch

    try:
        with full_disk_told():
            print_line(f"report: {write_report(folder)}")
    except RLHFError as error:
        print_error(str(error))
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf report",
        description="Write report.html, one page with verdict, curves, evaluation, samples and "
        "configuration, into the folder of a run, as the run itself does at its end; or about all "
        "stages into the folder above, as a recipe does.",
    )
    parser.add_argument("run", help="outputs/<run>/<model>/<stage>, or outputs/<run>/<model>")
    return parser
