"""lightning-rlhf export: a folder like `final/` from a kept checkpoint, or with whole weights."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from lightning_rlhf.callbacks.files import step_named, step_of
from lightning_rlhf.core.config import DType
from lightning_rlhf.core.errors import CheckpointError, ConfigError, require
from lightning_rlhf.core.validation import PositiveInt, check_value
from lightning_rlhf.evaluation.select import export_of
from lightning_rlhf.io.user_code import code_of_command, nearest_path
from lightning_rlhf.models.checkpoint import check_weights, config_faults, find, is_folder
from lightning_rlhf.runs.console import quiet_libraries
from lightning_rlhf.runs.folders import CONFIG, FINAL, read_config, run_folder
from lightning_rlhf.runs.resume import is_stale, saved
from lightning_rlhf.runs.settings import read_tree
from lightning_rlhf.runs.stage import Settings, TrainerConfig, stage_names
from lightning_rlhf.stages import fit
from lightning_rlhf.stages.merge import write_merged


def export(arguments: Sequence[str]) -> None:
    """Export a checkpoint, or merge a model."""
    given = parser().parse_args(arguments)
    out = None if given.out is None else Path(given.out)
    if given.step is None and not given.merge:
        raise ConfigError(
            "export is told no model; allowed: --step N for that of a kept checkpoint of a run, or "
            "--merge for that of a final/ folder as whole weights"
        )
    require(given.merge or given.dtype is None, "--dtype", given.dtype, "none without --merge")
    with code_of_command(given.code):
        if given.merge:
            merge_final(given.run, out, given.dtype, given.trust_remote_code)
        else:
            check_value("--step", given.step, PositiveInt)
            export_run(Path(given.run), given.step, out, given.trust_remote_code)


def export_run(folder: Path, step: int, out: Path | None, trust_remote_code: bool) -> Path:
    """Write the model of a step of the run in `folder`, and return the path.

    out: folder to write; None is `final_<step>` in the folder of the run.

    Raises:
        ConfigError: the folder holds no run of a stage that can be exported, or `out` exists.
        CheckpointError: there is no checkpoint of the step, or it is damaged or of another run.
    """
    settings = settings_of(folder, trust_remote_code=trust_remote_code)
    if not settings.definition.trains:
        raise ConfigError(f"{folder} is a run of stage={settings.stage}, which exports none")
    kept = {step_named(p) if p.stem.isdigit() else step_of(p): p for p in saved(folder)}
    if step not in kept:
        steps = ", ".join(map(str, sorted(kept))) or "none"
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; kept are: {steps}")
    out = folder / f"{FINAL}_{step:06d}" if out is None else out
    refuse_existing(out)
    if is_stale(settings):
        raise CheckpointError(
            f"{folder} cannot be exported: the models that it was started from are others now"
        )

    return fit.export(settings, export_of(folder, settings, kept[step], step, out))


@code_of_command()
def settings_of(folder: Path, *, trust_remote_code: bool = False) -> Settings:
    """Return the settings of the run in `folder`; earlier stages are looked for beside it.

    trust_remote_code: whether code that models bring may be executed. Other code that the run's
    configuration names is not: see `code_of_command`.
    Raises ConfigError where there is no training run, or one with code that may not be executed;
    CheckpointError where its file is damaged.
    """
    file = folder / CONFIG
    if not file.is_file():
        found = f"is no run: it has no {CONFIG}" if folder.is_dir() else "does not exist"
        beside = sorted(path.parent.name for path in folder.parent.glob(f"*/{CONFIG}"))
        runs = f"; runs beside it: {', '.join(beside)}" if beside else nearest_path(str(folder))
        raise ConfigError(
            f"{folder} {found}; allowed: the folder of a run of stage=ppo, sft or rm, as "
            f"outputs/<run>/<model>/ppo{runs}"
        )
    tree = read_config(file, "export has to know the configuration of the run")
    if "stage" not in tree or tree["stage"] not in stage_names(tree):
        raise CheckpointError(f"{file} is damaged: it names no stage")
    if not trust_remote_code:
        refuse_code(tree, file)
    stage = tree["stage"]
    if stage not in tree:
        raise CheckpointError(f"{file} is damaged: it lacks {stage}")
    # Nothing is logged, so that no logger asks for a key.
    unread: dict[str, Any] = {"logger": {"kind": "csv"}, "callbacks": {}}
    if isinstance(tree.get("trainer"), dict):
        ours = TrainerConfig.__dataclass_fields__
        unread["trainer"] = {
            key: value for key, value in tree["trainer"].items()
            if key in ours or isinstance(value, int | None) or value == "lightning.Trainer"
        }  # fmt: skip
    try:
        settings = read_tree(tree | unread)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    parts = folder.resolve().parts
    own = run_folder(Path(), settings.run, settings.model.name, settings.stage, settings.job).parts
    if parts[-len(own) :] != own:  # the folder was moved: its parents are where the run found them
        return settings
    return replace(settings, outputs=Path(*parts[: -len(own)]))


def refuse_code(tree: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError where the configuration of a run asks for code that a model brings."""
    asks = [(key, value) for key, value, _ in config_faults(tree) if "attn_implementation" in key]
    for key, value in [*trusting(tree), *asks]:
        raise ConfigError(
            f"{file} asks for code that a model brings: {key} is {value!r}. It runs with "
            "--trust-remote-code alone, which is for folders that you trust"
        )


def trusting(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each trust_remote_code, nested ones included, that is not false."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from trusting(value, f"{prefix}{key}.")
        elif key == "trust_remote_code" and value is not False:
            yield f"{prefix}{key}", value


def merge_final(source: str, out: Path | None, dtype: DType | None, trusted: bool) -> Path:
    """Write the model of a `final/` folder or hub id as whole weights, and return the path.

    out: folder to write; None is `<name>_merged` beside the folder.
    dtype: data type of the written weights; None is float32, in which they are merged.
    trusted: True if code that comes with the model may run.

    Raises:
        ConfigError: the folder holds no model of a stage, or `out` exists.
        CheckpointError: it is damaged, or its base weights are others now.
    """
    final = find(source, "FINAL")
    check_weights(final.adapter)
    if final.manifest is None:
        raise ConfigError(f"{final.path} has no manifest.json; allowed: the final/ of a run")
    if not trusted:
        refuse_code(final.manifest.config, final.path / "manifest.json")
    if out is None:
        require(is_folder(source), "--out", None, "a folder to write, for a model of the hub")
        here = final.path if final.path.name not in ("", "..") else final.path.resolve()
        out = here.with_name(f"{here.name}_merged")
    refuse_existing(out)

    quiet_libraries()
    return write_merged(final, out, dtype or "float32")


def refuse_existing(out: Path) -> None:
    """Raise ConfigError where the folder to write exists."""
    if os.path.lexists(out):
        raise ConfigError(f"--out {out} exists already; allowed: a folder that does not")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf export",
        description="Write the model of a kept checkpoint of a run as a folder like final/, with "
        "its tokenizer and manifest; or that of a final/ folder as whole weights, adapters merged.",
    )
    parser.add_argument(
        "run", metavar="FOLDER",
        help="with --step the folder of the run, as outputs/<run>/<model>/ppo; with --merge a "
        "final/ folder or hub id",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--step", type=int, metavar="N", help="which: an iteration of PPO, or an optimizer step"
    )
    what.add_argument(
        "--merge", action="store_true",
        help="merge the adapter into the weights that it is applied to",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=get_args(DType), help="data type of merged weights (float32)"
    )
    parser.add_argument(
        "--out", metavar="DIR",
        help="folder to write (final_<step> in the folder of the run; <name>_merged beside final/)",
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
