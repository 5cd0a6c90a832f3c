"""lightning-rlhf export: a folder like `final/` from any kept checkpoint of a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_rlhf.cli.secrecy import without_secrets
from lightning_rlhf.core.errors import CheckpointError, ConfigError, RLHFError
from lightning_rlhf.core.validation import PositiveInt, check_value
from lightning_rlhf.io.storage import full_disk_told
from lightning_rlhf.stages.console import print_error
from lightning_rlhf.stages.stage import Settings


def export(arguments: Sequence[str]) -> None:
    """Export a checkpoint; exit with status 1 after an error."""
    given = parser().parse_args(arguments)
    try:
        check_value("--step", given.step, PositiveInt)
        out = None if given.out is None else Path(given.out)
        with full_disk_told():
            export_run(Path(given.run), given.step, out, given.trust_remote_code)
    except RLHFError as error:
        print_error(without_secrets(str(error)))
        sys.exit(1)


def export_run(folder: Path, step: int, out: Path | None, trust_remote_code: bool) -> Path:
    """Write the model of a step of the run in `folder`, and return the path.

    out: folder to write; None is `final_<step>` in the folder of the run.

    Raises:
        ConfigError: the folder holds no run of a stage that can be exported, or `out` exists.
        CheckpointError: there is no checkpoint of the step, or it is damaged or of another run.
    """
    from lightning_rlhf.replay.plan import settings_of
    from lightning_rlhf.stages.folder.folders import exported

    settings = settings_of(folder, trust_remote_code=trust_remote_code)
    write = settings.definition.export
    if write is None:
        raise ConfigError(f"{folder} is a run of stage={settings.stage}, which exports none")
    checkpoint = checkpoint_of(folder, step)
    out = exported(folder, step) if out is None else out
    if os.path.lexists(out):
        raise ConfigError(f"--out {out} exists already; allowed: a folder that does not")
    check_parents(folder, settings)

    # The slow imports come after the checks of names and folders.
    from lightning_rlhf.stages.accelerator import check_accelerator
    from lightning_rlhf.stages.chosen import export_of
    from lightning_rlhf.stages.console import quiet_libraries
    from lightning_rlhf.stages.run import computing

    quiet_libraries()
    check_accelerator(settings)
    with computing(settings):
        return write(settings, settings.config, export_of(folder, settings, checkpoint, step, out))


def checkpoint_of(folder: Path, step: int) -> Path:
    """Return the checkpoint of a step of the run, which may be the best one.

    Raises CheckpointError, with the steps that are kept, where there is none.
    """
    from lightning_rlhf.callbacks.checkpoint_files import step_named, step_of
    from lightning_rlhf.stages.folder.resume import saved

    kept = {step_named(p) if p.stem.isdigit() else step_of(p): p for p in saved(folder)}
    if step not in kept:
        steps = ", ".join(map(str, sorted(kept))) or "none"
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; kept are: {steps}")
    return kept[step]


def check_parents(folder: Path, settings: Settings) -> None:
    """Raise CheckpointError where the models that the run was started from are others now."""
    from lightning_rlhf.stages.folder.folders import is_stale

    if is_stale(settings):
        raise CheckpointError(
            f"{folder} cannot be exported: the models that it was started from are others now"
        )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf export",
        description="Write the model of a kept checkpoint of stage=sft, rm, ppo or dpo as a folder "
        "like final/, with its tokenizer and manifest.",
    )
    parser.add_argument("run", help="folder of the run, as outputs/<run>/<model>/ppo")
    parser.add_argument(
        "--step", type=int, required=True, metavar="N",
        help="which: an iteration of PPO, or an optimizer step",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="DIR", help="folder to write (final_<step> in the folder of the run)"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true",
        help="run code that comes with the model where the folder's configuration asks for it; "
        "without this such a folder is refused",
    )  # fmt: skip
    return parser
