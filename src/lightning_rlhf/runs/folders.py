"""The folders of a run: paths, state, cleaning up, and the checkpoints of earlier stages."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Literal

from lightning_rlhf.callbacks.checkpoint_files import numbered, step_named
from lightning_rlhf.callbacks.logger_config import WANDB_ID
from lightning_rlhf.core.errors import (
    CheckpointError,
    ConfigError,
    HubError,
    RLHFError,
    StorageError,
)
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import (
    UNFINISHED,
    delete,
    foreign_names,
    is_system,
    make_folder,
    written_whole,
)
from lightning_rlhf.models.checkpoint import (
    Final,
    check_weights,
    digest,
    find,
    is_folder,
    refuse_missing_folder,
)
from lightning_rlhf.models.config import BASE, REWARD, SFT
from lightning_rlhf.rewards.config import HeadConfig, TextModelConfig
from lightning_rlhf.runs.changes import ENDING, changes, listed, read_config
from lightning_rlhf.runs.stage import Settings, reward_key

FINAL, FAILED, CHECKPOINTS = "final", "failed.txt", "checkpoints"
CONFIG, PARENTS, METRICS = "config.json", "parents.json", "metrics.csv"
RUN_ID, PAGE = "run_id.txt", "report.html"
LOCK, DELETED = ".lightning-rlhf.lock", ".lightning-rlhf.deleted"
"""Names in a run's folder: the lock file of its process, and a folder for files to delete."""
FILES = (
    CONFIG, PARENTS, METRICS, RUN_ID, FAILED, ENDING, WANDB_ID, "last_batch.parquet", "curves.png",
    PAGE, "diagnosis.json", "diminishing.json", "diminishing.png", "replay_*.html",
    "checkpoints/*.ckpt*", "samples/*.jsonl", "rollouts/*.parquet",
)  # fmt: skip
"""Patterns of the files that a run writes or reads in its folder."""
FOLDERS = (CHECKPOINTS, FINAL, "rollouts", "samples", "tensorboard", "wandb")
"""Names of the folders that a run writes in its folder."""


def run_folder(outputs: Path, run: str, model: str, stage: str, job: str | None) -> Path:
    """Return outputs/<run>/<model>/<stage>, or outputs/<run>/<model>/<job>/<stage>."""
    return outputs / run / model / stage if job is None else outputs / run / model / job / stage


def folder_of(settings: Settings, stage: str | None = None) -> Path:
    """Return the folder of this run, or of another stage of it."""
    return run_folder(
        settings.outputs, settings.run, settings.model.name, stage or settings.stage, settings.job
    )


def run_name(settings: Settings) -> str:
    """Return the display name of the run: run/model/stage, or run/model/job/stage."""
    return folder_of(settings).relative_to(settings.outputs).as_posix()


def check_writable(key: str, outputs: Path, folder: Path) -> None:
    """Raise ConfigError where `folder`, in `outputs` of that key, could not be written into."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        link = f", a symbolic link to {os.readlink(there)}," if there.is_symlink() else ""
        raise ConfigError(
            f"{key}={outputs}: {there}{link} is not a folder that can be written into"
        )


def is_marked(folder: Path) -> bool:
    """Return whether a config.json in a folder names a stage, as that of a run does."""
    with suppress(OSError, ValueError, RecursionError):
        tree = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return isinstance(tree, dict) and isinstance(tree.get("stage"), str)
    return False


def refuse_foreign_files(folder: Path) -> None:
    """Raise ConfigError where a folder holds files and no run: its names may be those of ours."""
    begun = {LOCK, DELETED, RUN_ID, PARENTS, FAILED}
    there = set(os.listdir(folder)) - begun if os.path.isdir(folder) else set()
    found = sorted(n for n in there if not n.endswith(UNFINISHED) and not is_system(n))
    if found and not is_marked(folder):
        raise ConfigError(
            f"{folder} holds {found[0]} and no config.json of a run; move that away, or give "
            "another run= or job="
        )


def leave_failed(folder: Path, reason: str) -> None:
    """Write failed.txt with the reason, in one line, where the folder can be written."""
    # A folder that cannot be written, or holds other files, may be the reason itself.
    with suppress(OSError, RLHFError):
        refuse_foreign_files(folder)
        make_folder(folder)
        with written_whole(folder / FAILED) as beside:
            beside.write_text(reason + "\n")


def claim(settings: Settings, parents: Mapping[str, Final]) -> Path:
    """Make the run's folder and record its `parents`; files of another run are deleted.

    Such a run is one to be overwritten, or one that ended before its first step.

    Raises ConfigError where it cannot be written.
    """
    folder = folder_of(settings)
    digests = {role: digest(final.path) for role, final in parents.items()}
    try:
        make_folder(folder)
        delete(folder / DELETED)  # may be left over from a killed process
        is_new = settings.overwrite or (is_unbegun(folder) and not settings.resume)
        if is_new and is_marked(folder):
            clear(folder)
        delete_unfinished(folder)
        if not settings.resume:
            with written_whole(folder / RUN_ID) as beside:
                beside.write_text(secrets.token_hex(8))
        (folder / ENDING).unlink(missing_ok=True)
        for name, tree in ((PARENTS, digests), (CONFIG, settings.tree)):
            with written_whole(folder / name) as beside:
                beside.write_text(json.dumps(tree, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"outputs={settings.outputs}: {error.strerror}: {folder}") from error
    return folder


def exported(folder: Path, step: int) -> Path:
    """Return the path of the model of a step, beside `final/`."""
    return folder / f"{FINAL}_{step:06d}"


def clear(folder: Path) -> None:
    """Delete what a run and its exports left in a folder; other files, and its lock, stay.

    The folder may be a symbolic link. What is deleted is moved aside first, the configuration last,
    so that a kill leaves no partial run that could be mistaken for another one.
    Raises StorageError, before anything is deleted, where a user's file is among what it would be.
    """
    names = sorted(filter(is_ours, set(os.listdir(folder)) - {LOCK, DELETED}), key=CONFIG.__eq__)
    foreign = [f"{name}/{inside}" for name in names for inside in foreign_inside(folder, name)]
    if foreign:
        raise StorageError(
            f"{folder} was not emptied: {', '.join(foreign)} is no file of a run. Move it away"
        )
    aside = folder / DELETED
    aside.mkdir()
    for name in names:
        os.replace(folder / name, aside / name)
    delete(aside)


def foreign_inside(folder: Path, name: str) -> list[str]:
    """Return the names that no run wrote into its folder `name`, which lies in `folder`."""
    if not (folder / name).is_dir():
        return []
    if name.startswith(FINAL):
        return foreign_names(folder / name)
    patterns = [pattern for pattern in FILES if pattern.startswith(f"{name}/")]
    return [
        inside
        for inside in sorted(os.listdir(folder / name) if patterns else ())
        if not inside.endswith(UNFINISHED)
        and not is_system(inside)
        and not any(fnmatch(f"{name}/{inside}", pattern) for pattern in patterns)
    ]


def is_ours(name: str) -> bool:
    """Return whether a file or folder of this name in a run's folder is the run's, or an export."""
    patterns = (*(file.partition("/")[0] for file in FILES), *FOLDERS, f"{FINAL}_[0-9]*")
    return any(fnmatch(name, pattern) for pattern in patterns)


def delete_unfinished(folder: Path) -> None:
    """Delete files and folders that a killed process left half written, and failed.txt."""
    from lightning_rlhf.callbacks.evaluation import SAMPLES  # which takes seconds to import
    from lightning_rlhf.data.rollouts import FOLDER as ROLLOUTS

    for place in (folder, *(folder / name for name in (CHECKPOINTS, SAMPLES, ROLLOUTS))):
        for path in place.glob(f"*{UNFINISHED}"):
            delete(path)
    delete(folder / FAILED)


def is_used(folder: Path) -> bool:
    """Return whether a run was started in `folder`.

    Raises CheckpointError where a file has the name of a run's folder, or the other way round.
    """
    check_kinds(folder)
    return (folder / CONFIG).is_file()


def check_kinds(folder: Path) -> None:
    """Raise CheckpointError where a name in a run's `folder` is of the wrong kind.

    Names of files must be files and names of folders must be folders; links are followed.
    """
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        name = path.relative_to(folder).as_posix()
        for kind, names, is_one in (
            ("file", FILES, path.is_file),
            ("folder", FOLDERS, path.is_dir),
        ):
            if any(fnmatch(name, wanted) for wanted in names) and not is_one():
                raise CheckpointError(
                    f"{path} is no {kind}, in the place of one that a run writes or reads. Move it "
                    "away"
                )


def is_unbegun(folder: Path) -> bool:
    """Return whether a run was started in `folder` and ended before it finished its first step."""
    steps = [step_named(path) for path in numbered(folder / CHECKPOINTS)]
    if not is_used(folder) or (folder / FINAL).is_dir() or any(steps):
        return False
    # Imported here, since it takes seconds: errors in names are raised before.
    from lightning_rlhf.callbacks.loggers import read_rows
    from lightning_rlhf.data.rollouts import LAST_BATCH, recorded_iterations

    is_batch_kept = recorded_iterations(folder) or (folder / LAST_BATCH).exists()
    return not is_batch_kept and not any(read_rows(folder / METRICS))


State = Literal["new", "done", "cut off", "outdated"]


def state_of(settings: Settings) -> State:
    """Return the state of the run: a `State`.

    new: nothing is there; done: `final/` is there; cut off: there is a part to resume;
    outdated: the checkpoints it was started from have changed.

    Raises ConfigError where the folder holds the stage with another configuration.
    """
    folder = folder_of(settings)
    if not is_used(folder) or is_unbegun(folder):
        return "new"
    if changed := changes(settings.definition, settings.tree, folder / CONFIG):
        raise ConfigError(
            f"{folder} was run with another configuration: {listed(changed)}. Give run=NAME to "
            "keep both, or overwrite=true to do it again"
        )
    if is_stale(settings):
        print_line(f"{folder}: the models it was started from are others now; it is done again")
        return "outdated"
    if (folder / FINAL).is_dir():
        return "done"
    return "cut off"


def is_finished(settings: Settings) -> bool:
    """Return whether there is a `final/` folder, of any configuration."""
    return (folder_of(settings) / FINAL).is_dir()


def is_complete(folder: Path) -> bool:
    """Return whether a finished run has its page, no older than `final/`, and no failed.txt."""
    page, final = folder / PAGE, folder / FINAL
    is_written = page.is_file() and page.stat().st_mtime_ns >= final.stat().st_mtime_ns
    return is_written and not (folder / FAILED).exists()


def is_stale(settings: Settings) -> bool:
    """Return whether the checkpoints that the run was started from have changed since.

    A checkpoint that was deleted does not count: results made from it stay valid.
    """
    file = folder_of(settings) / PARENTS
    then = read_config(file, "delete it to go on") if file.is_file() else {}
    if not all(isinstance(was, str) for was in then.values()):
        raise CheckpointError(f"{file} is damaged: it names no digest; delete it to go on")
    try:
        now = {role: digest(final.path) for role, final in find_parents(settings).items()}
    except (CheckpointError, HubError):
        return False
    return any(now[role] != was for role, was in then.items() if role in now)


def find_parents(settings: Settings) -> dict[str, Final]:
    """Return the checkpoints that this stage starts from, by role."""
    stage = settings.definition
    if not stage.reads_sft and settings.policy.checkpoint not in (None, BASE):
        raise ConfigError(
            f"policy.checkpoint is {settings.policy.checkpoint!r}, but stage={stage.name} starts "
            "from model.name_or_path; set that instead"
        )
    found = {SFT: find_sft(settings)} if stage.reads_sft else {}
    if stage.reads_reward:
        found |= find_rewards(settings)
    found |= stage.models(settings)
    parents = {role: final for role, final in found.items() if final is not None}
    for final in parents.values():
        check_weights(final.adapter)
    return parents


def find_sft(settings: Settings) -> Final | None:
    """Return the SFT model to start from; None means the base model itself."""
    given = settings.policy.checkpoint
    if given == BASE:
        return None
    if given is not None:
        return find(given, "policy.checkpoint")
    final = earlier(settings, "sft")
    if final is None:
        raise CheckpointError(
            f"stage={settings.stage} starts from an SFT model, and {folder_of(settings, 'sft')} "
            "has none. Run stage=sft first, or give policy.checkpoint=FOLDER_OR_HUB_ID, or "
            "policy.checkpoint=base to start from the model as it is"
        )
    return final


def reward_role(settings: Settings, name: str) -> str:
    """Return the role of a component of the reward among the roles on the base model."""
    return REWARD if len(settings.reward) == 1 else f"{REWARD}_{name}"


def find_rewards(settings: Settings) -> dict[str, Final]:
    """Return the reward models that are local folders or were trained by stage=rm, by role."""
    found = {}
    for name, component in settings.reward.items():
        role, key = reward_role(settings, name), reward_key(settings, name)
        if isinstance(component, HeadConfig):
            found[role] = find_head(settings, component, f"{key}.checkpoint")
        elif isinstance(component, TextModelConfig):
            refuse_missing_folder(component.name_or_path, f"{key}.name_or_path")
            if is_folder(component.name_or_path):
                found[role] = find(component.name_or_path, f"{key}.name_or_path")
    return found


def find_head(settings: Settings, config: HeadConfig, key: str) -> Final:
    """Return the reward model of stage=rm that is to be maximised or evaluated."""
    if config.checkpoint is not None:
        return find(config.checkpoint, key)
    final = earlier(settings, "rm")
    if final is None:
        raise CheckpointError(
            f"stage={settings.stage} needs a reward model, and {folder_of(settings, 'rm')} has "
            f"none. Train one with stage=rm, or give {key}=FOLDER_OR_HUB_ID, or reward=random for "
            "a random head that means nothing"
        )
    return final


def earlier(settings: Settings, stage: str) -> Final | None:
    """Return the `final/` of `stage` of the same job, of one around it, or of the run."""
    around = PurePosixPath(settings.job).parents if settings.job else ()
    outer = [str(path) for path in around if path != PurePosixPath(".")]
    for job in dict.fromkeys((settings.job, *outer, None)):
        folder = run_folder(settings.outputs, settings.run, settings.model.name, stage, job)
        if (folder / FINAL).is_dir():
            return find(str(folder / FINAL), f"{stage} of run={settings.run}")
    return None
