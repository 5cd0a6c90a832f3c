"""Commands that write something into the folder of a run that is there: report, diminishing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.io.storage import full_disk_told
from lightning_rlhf.stages.console import print_error, print_line


def report(arguments: Sequence[str]) -> None:
    """Write report.html and print its path; exit with status 1 after an error."""
    folder = Path(report_parser().parse_args(arguments).run)
    from lightning_rlhf.stages.reports import write_report  # which imports torch

    with _errors_told():
        print_line(f"report: {write_report(folder)}")


def diminishing(arguments: Sequence[str]) -> None:
    """Write and print the point of diminishing returns; exit with status 1 after an error."""
    folder = Path(diminishing_parser().parse_args(arguments).run)
    from lightning_rlhf.stages.diminishing import again  # which imports matplotlib

    with _errors_told():
        again(folder)


@contextmanager
def _errors_told() -> Iterator[None]:
    try:
        with full_disk_told():
            yield
    except RLHFError as error:
        print_error(str(error))
        sys.exit(1)


def report_parser() -> argparse.ArgumentParser:
    """Return the parser of `lightning-rlhf report`."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf report",
        description="Write report.html, one page with verdict, curves, evaluation, samples and "
        "configuration, into the folder of a run, as the run itself does at its end; or about all "
        "stages into the folder above, as a recipe does.",
    )
    parser.add_argument("run", help="outputs/<run>/<model>/<stage>, or outputs/<run>/<model>")
    return parser


def diminishing_parser() -> argparse.ArgumentParser:
    """Return the parser of `lightning-rlhf diminishing`."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf diminishing",
        description="Find the iteration of a run of stage=ppo after which more compute bought next "
        "to nothing, from its metrics.csv. Writes diminishing.json and diminishing.png into its "
        "folder, as the run itself does at its end.",
    )
    parser.add_argument("run", help="folder of the run, as outputs/<run>/<model>/ppo")
    return parser
