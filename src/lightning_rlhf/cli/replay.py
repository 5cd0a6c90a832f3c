"""lightning-rlhf replay: repeats a recorded update of PPO, or the batch at which a run ended."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_rlhf.cli.secrecy import without_secrets
from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.core.validation import PositiveInt, check_value
from lightning_rlhf.io.storage import full_disk_told
from lightning_rlhf.io.user_code import code_of_command
from lightning_rlhf.stages.console import print_error


def replay(arguments: Sequence[str]) -> None:
    """Replay a run and show it; exit with status 1 after an error or a difference."""
    given = parser().parse_args(arguments)
    try:
        if given.iteration is not None:
            check_value("--iteration", given.iteration, PositiveInt)
        check_value("--responses", given.responses, PositiveInt)
        with code_of_command(given.code), full_disk_told():
            same = replay_run(
                Path(given.run), given.iteration, given.responses, given.trust_remote_code
            )
    except RLHFError as error:
        print_error(without_secrets(str(error)))
        sys.exit(1)
    if not same:
        sys.exit(1)


def replay_run(folder: Path, iteration: int | None, count: int, trust_remote_code: bool) -> bool:
    """Replay a run and return whether it equals the record. Slow imports are made here."""
    from lightning_rlhf.replay.plan import settings_of
    from lightning_rlhf.replay.run_rows import plan_rows, show_rows
    from lightning_rlhf.replay.show import replay_update
    from lightning_rlhf.stages.accelerator import check_accelerator
    from lightning_rlhf.stages.console import quiet_libraries
    from lightning_rlhf.stages.run import computing

    quiet_libraries()
    settings = settings_of(folder, trust_remote_code=trust_remote_code)
    if settings.definition.replays == "updates":
        return replay_update(folder, settings, iteration, count)
    batch, checkpoint = plan_rows(folder, settings, iteration)
    check_accelerator(settings)
    with computing(settings):
        return show_rows(batch, checkpoint, settings, count)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf replay",
        description="Run a recorded update of stage=ppo record=true once more, compare it bit for "
        "bit with the record, and show what it did to each token: here and in replay_N.html in "
        "the run folder. Of stage=sft, rm and dpo, show the batch that broke the run off as not "
        "finite: which rows, token by token.",
    )
    parser.add_argument("run", help="folder of the run, as outputs/<run>/<model>/ppo")
    parser.add_argument(
        "--iteration", type=int, metavar="N",
        help="which, from 1 as in metrics.csv (the newest that is recorded)",
    )  # fmt: skip
    parser.add_argument(
        "--responses", type=int, default=3, metavar="K",
        help="how many to show, those first that the update changed most, or whose loss is largest "
        "(%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--code", action="append", default=[], metavar="FILE.py:NAME",
        help="stage or sampler of your own that the run used; what its folder names is not run",
    )  # fmt: skip
    parser.add_argument(
        "--trust-remote-code", action="store_true",
        help="run code that comes with the model where the folder's configuration asks for it; "
        "without this such a folder is refused",
    )  # fmt: skip
    return parser
