"""Output of the command line, and the paths of shipped files."""

import json
import os
import sys
import time
import warnings
from pathlib import Path

import lightning_rlhf
from lightning_rlhf.io.console import visible, visible_line, wrap_words
from lightning_rlhf.parallel.world import world

PACKAGE = Path(lightning_rlhf.__file__).parent
CHECKOUT = PACKAGE.parents[1]
HOME = CHECKOUT if (CHECKOUT / "conf" / "config.yaml").is_file() else PACKAGE
"""Folder that holds conf/ and recipes/: the checkout, or the installed package."""
CONF, RECIPES = HOME / "conf", HOME / "recipes"
PYTHONS_FORMAT = warnings.formatwarning
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path of the file in which a process leaves its error for torchrun's
launcher."""
PATIENCE_S = 10
"""Seconds in which the first process of a machine prints an error that all of them meet."""


def print_error(message: str) -> None:
    """Print the reason why the command ends, in one line on standard error.

    An error that all processes of a machine meet is printed by the first, while the others wait
    until the launcher ends them. A process that is not ended has met an error of its own. The
    message is also left for torchrun's launcher, in the form of `ProcessFailure`.
    """
    if world().local_rank:
        time.sleep(PATIENCE_S)
    print(f"error: {visible_line(message)}", file=sys.stderr)
    if ERROR_FILE in os.environ:
        left = {"message": message, "timestamp": int(time.time())}
        file = Path(os.environ[ERROR_FILE])
        try:
            file.write_text(json.dumps(left))
        except OSError:  # as on a full disk: the launcher reads no file rather than half of one
            file.unlink(missing_ok=True)


def shown_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    line: str | None = None,
) -> str:  # fmt: skip
    """Return a warning as text: ours in one line without its source, others as Python does."""
    if Path(filename).is_relative_to(PACKAGE):
        return f"{wrap_words(f'warning: {visible_line(str(message))}', sys.stderr.isatty())}\n"
    return visible(PYTHONS_FORMAT(message, category, filename, lineno, line))
