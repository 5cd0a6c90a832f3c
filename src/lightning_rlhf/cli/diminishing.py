"""lightning-rlhf diminishing: the point of diminishing returns of a run that is there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.io.storage import full_disk_told
from lightning_rlhf.stages.console import print_error


def diminishing(arguments: Sequence[str]) -> None:
    """Write and print the point of diminishing returns; exit with status 1 after an error."""
    folder = Path(parser().parse_args(arguments).run)
    from lightning_rlhf.stages.diminishing import again  # which imports matplotlib

    try:
        with full_disk_told():
            again(folder)
    except RLHFError as error:
        print_error(str(error))
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf diminishing",
        description="Find the iteration of a run of stage=ppo after which more compute bought next "
        "to nothing, from its metrics.csv. Writes diminishing.json and diminishing.png into its "
        "folder, as the run itself does at its end.",
    )
    parser.add_argument("run", help="folder of the run, as outputs/<run>/<model>/ppo")
    return parser
