"""Where a run writes, and where it finds what earlier stages left."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from lightning_rlhf.callbacks.checkpoint_files import numbered, step_named
from lightning_rlhf.callbacks.logger_config import WANDB_ID
from lightning_rlhf.core.errors import CheckpointError, ConfigError, HubError
from lightning_rlhf.core.storage import UNFINISHED, delete, make_folder, written_whole
from lightning_rlhf.models.checkpoint import Final, digest, find
from lightning_rlhf.models.config import BASE, REWARD, SFT
from lightning_rlhf.models.weights import check_weights, is_folder, refuse_missing_folder
from lightning_rlhf.rewards.config import HeadConfig, ModelConfig
from lightning_rlhf.stages.changes import changes, listed, read_config
from lightning_rlhf.stages.console import say
from lightning_rlhf.stages.stage import Settings, reward_key

FINAL, FAILED, CHECKPOINTS = "final", "failed.txt", "checkpoints"
CONFIG, PARENTS, METRICS = "config.json", "parents.json", "metrics.csv"
RUN_ID = "run_id.txt"
LOCK, DELETED = ".lock", ".deleted"
"""Names in a run's folder: what its process holds, and a folder for what is deleted."""
FILES = (
    CONFIG, PARENTS, METRICS, RUN_ID, FAILED, WANDB_ID, "last_batch.parquet", "curves.png",
    "replay_*.html",
    "checkpoints/*.ckpt*", "samples/*.jsonl", "rollouts/*.parquet", "rollouts/*.safetensors",
)  # fmt: skip
"""Patterns of the files that a run writes or reads in its folder."""
FOLDERS = (CHECKPOINTS, FINAL, "rollouts", "samples", "tensorboard", "wandb")
"""Names of the folders there."""


def run_folder(outputs: Path, run: str, model: str, stage: str, job: str | None) -> Path:
    """outputs/<run>/<model>/<stage>, or outputs/<run>/<model>/<job>/<stage>."""
    return outputs / run / model / stage if job is None else outputs / run / model / job / stage


def folder_of(settings: Settings, stage: str | None = None) -> Path:
    """The folder of this run, or of another stage of it."""
    return run_folder(
        settings.outputs, settings.run, settings.model.name, stage or settings.stage, settings.job
    )


def run_name(settings: Settings) -> str:
    """Return run/model/stage, or run/model/job/stage: the run's name wherever people read it."""
    return folder_of(settings).relative_to(settings.outputs).as_posix()


def check_writable(outputs: Path, folder: Path) -> None:
    """Raise ConfigError where `folder` could not be made or written into."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        link = f", a symbolic link to {os.readlink(there)}," if there.is_symlink() else ""
        raise ConfigError(
            f"outputs={outputs}: {there}{link} is not a folder that can be written into"
        )


def claim(settings: Settings, parents: Mapping[str, Final]) -> Path:
    """Make the run's folder, without what another run left in it, and note its `parents`.

    That is one to be overwritten, or one that ended before its first step.

    Raises ConfigError where it cannot be written.
    """
    folder = folder_of(settings)
    digests = {role: digest(final.path) for role, final in parents.items()}
    try:
        make_folder(folder)
        delete(folder / DELETED)  # where a kill may leave a part of it
        if settings.overwrite or (is_unbegun(folder) and not settings.resume):
            clear(folder)
        delete_unfinished(folder)
        if not settings.resume:
            with written_whole(folder / RUN_ID) as beside:
                beside.write_text(secrets.token_hex(8))
        (folder / FAILED).unlink(missing_ok=True)
        for name, tree in ((PARENTS, digests), (CONFIG, settings.tree)):
            with written_whole(folder / name) as beside:
                beside.write_text(json.dumps(tree, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"outputs={settings.outputs}: {error.strerror}: {folder}") from error
    return folder


def clear(folder: Path) -> None:
    """Delete what is in a run's folder, but for its lock; the folder may be a symbolic link.

    It is moved aside first, the configuration last, so that a kill leaves no half of a run that
    could be taken for another one.
    """
    aside = folder / DELETED
    aside.mkdir()
    names = set(os.listdir(folder)) - {LOCK, DELETED}
    for name in sorted(names, key=CONFIG.__eq__):
        os.replace(folder / name, aside / name)
    delete(aside)


def delete_unfinished(folder: Path) -> None:
    """Delete what a kill left half written."""
    from lightning_rlhf.callbacks.samples import SAMPLES  # which takes seconds to import
    from lightning_rlhf.data.rollouts import FOLDER as ROLLOUTS

    for place in (folder, *(folder / name for name in (CHECKPOINTS, SAMPLES, ROLLOUTS))):
        for path in place.glob(f"*{UNFINISHED}"):
            delete(path)


def is_used(folder: Path) -> bool:
    """Whether a run was started in `folder`.

    Raises CheckpointError where something else stands in the place of a file or folder of a run.
    """
    check_kinds(folder)
    return (folder / CONFIG).is_file()


def check_kinds(folder: Path) -> None:
    """Raise CheckpointError unless each file of a run that is in `folder` is a file, and each
    folder a folder; a link counts as what it leads to."""
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
    """Whether a run was started in `folder` and ended before its first step was done."""
    steps = [step_named(path) for path in numbered(folder / CHECKPOINTS)]
    if not is_used(folder) or (folder / FINAL).is_dir() or any(steps):
        return False
    # Imported here, since it takes seconds: what the names above tell is said before.
    from lightning_rlhf.callbacks.metrics_file import read_rows
    from lightning_rlhf.data.last_batch import last_batch_of
    from lightning_rlhf.data.rollouts import recorded_iterations

    is_batch_kept = recorded_iterations(folder) or last_batch_of(folder).exists()
    return not is_batch_kept and not any(read_rows(folder / METRICS))


State = Literal["new", "done", "cut off", "outdated"]


def state_of(settings: Settings) -> State:
    """What is there of the run: nothing, all, a part to go on from, or what is to be done anew.

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
        say(f"{folder}: the models it was started from are others now; it is done again")
        return "outdated"
    if (folder / FINAL).is_dir():
        return "done"
    return "cut off"


def is_finished(settings: Settings) -> bool:
    """Whether there is a `final/`, of whatever configuration."""
    return (folder_of(settings) / FINAL).is_dir()


def is_stale(settings: Settings) -> bool:
    """Whether the checkpoints that the run was started from are others now.

    One that is gone is none of them: what was made of it is still good.
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
    """Role -> the checkpoint that plays it in this stage."""
    found = {}
    if settings.definition.reads_sft:
        found[SFT] = find_sft(settings)
    if settings.definition.reads_reward:
        found |= find_rewards(settings)
    parents = {role: final for role, final in found.items() if final is not None}
    for final in parents.values():
        check_weights(final.path)
    return parents


def find_sft(settings: Settings) -> Final | None:
    """The SFT model to start from; None means the base model as it is."""
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
    """What a component of the reward is called among the roles on the base."""
    return REWARD if len(settings.reward) == 1 else f"{REWARD}_{name}"


def find_rewards(settings: Settings) -> dict[str, Final]:
    """Role -> the reward models that are folders here or were trained by stage=rm."""
    found = {}
    for name, component in settings.reward.items():
        role, key = reward_role(settings, name), reward_key(settings, name)
        if isinstance(component, HeadConfig):
            found[role] = find_head(settings, component, f"{key}.checkpoint")
        elif isinstance(component, ModelConfig):
            refuse_missing_folder(component.name_or_path, f"{key}.name_or_path")
            if is_folder(component.name_or_path):
                found[role] = find(component.name_or_path, f"{key}.name_or_path")
    return found


def find_head(settings: Settings, config: HeadConfig, key: str) -> Final:
    """The reward model of stage=rm that is to be maximised, or looked at."""
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
    """What `stage` of the same run left: of the same job of a sweep, else of the run itself."""
    for job in dict.fromkeys((settings.job, None)):
        folder = run_folder(settings.outputs, settings.run, settings.model.name, stage, job)
        if (folder / FINAL).is_dir():
            return find(str(folder / FINAL), f"{stage} of run={settings.run}")
    return None
