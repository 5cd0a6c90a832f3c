"""Output of the command line, and the paths of shipped files."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning_rlhf
from lightning_rlhf.core.errors import counted
from lightning_rlhf.io.console import print_line, visible, visible_line
from lightning_rlhf.parallel.world import world

if TYPE_CHECKING:
    from lightning_rlhf.data.lengths import Tokenised
    from lightning_rlhf.data.problems import Problems
    from lightning_rlhf.data.rows import Rows


PACKAGE = Path(lightning_rlhf.__file__).parent
CHECKOUT = PACKAGE.parents[1]
HOME = CHECKOUT if (CHECKOUT / "conf" / "config.yaml").is_file() else PACKAGE
"""Folder that holds conf/ and recipes/: the checkout, or the installed package."""
CONF, RECIPES = HOME / "conf", HOME / "recipes"


PYTHONS_FORMAT = warnings.formatwarning
FEW = 20
"""Number of rows below which a note is printed: each is 5 % of the training or validation rows."""
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


def print_lengths(
    what: str, rows: Rows[Any], tokenised: Tokenised[Any], *, to_validate: bool = False
) -> None:
    """Print the number of rows to train or validate on, and of those dropped or cut."""
    count = len(tokenised.examples)
    shown = counted(count, what) + f" to validate on, from {rows.source}" * to_validate
    lost = rows.left_out + tokenised.dropped
    notes = [f"{n} left out ({reason})" for reason, n in sorted(lost.items())]
    notes += [f"{n} with {reason}" for reason, n in sorted(tokenised.cut.items())]
    print_line(", ".join([shown, *notes, *note_on_few(count, to_validate=to_validate)]))


def note_on_few(count: int, *, to_validate: bool) -> list[str]:
    """Return a note where there are fewer than FEW rows to train or to validate on."""
    more = "data.max_val_rows, data.val_fraction, or a file of their own, gives more"
    note = f"too few to measure with ({more})" if to_validate else "too few to learn much from"
    return [note] * (count < FEW)


def print_problems(problems: Problems) -> None:
    """Print the problems of the preference pairs in one line, or nothing if there are none."""
    found = [problem.line for problem in problems.counted.values() if problem.count]
    found += [problems.length.line] if problems.length.one_sided else []
    if found:
        print_line(f"preference pairs to look at: {'; '.join(found)}", "yellow")


def shown_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    line: str | None = None,
) -> str:  # fmt: skip
    """Return a warning as text: ours in one line without its source, others as Python does."""
    if Path(filename).is_relative_to(PACKAGE):
        return f"warning: {visible_line(str(message))}\n"
    return visible(PYTHONS_FORMAT(message, category, filename, lineno, line))
