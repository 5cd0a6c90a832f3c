"""The folder of a run: its names and files, the models that it starts from, and its end."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from lightning_rlhf.callbacks.files import WANDB_ID, Origin, numbered, read_rows
from lightning_rlhf.core import validation
from lightning_rlhf.core.config import Mode
from lightning_rlhf.core.errors import CheckpointError, ConfigError, RLHFError, StorageError
from lightning_rlhf.io import storage
from lightning_rlhf.models import checkpoint as models
from lightning_rlhf.models.config import BASE, REWARD, SFT, ModelConfig
from lightning_rlhf.rewards.config import HeadConfig, TextModelConfig
from lightning_rlhf.runs.stage import Settings, Stage, reward_key, section

FINAL, FAILED, CHECKPOINTS = "final", "failed.txt", "checkpoints"
CONFIG, PARENTS, METRICS, ENDING = "config.json", "parents.json", "metrics.csv", "ending.json"
RUN_ID, PAGE = "run_id.txt", "report.html"
LOCK, DELETED = ".lightning-rlhf.lock", ".lightning-rlhf.deleted"
"""Names in a run's folder: the lock file of its process, and a folder for files to delete."""
INSIDE = {CHECKPOINTS: "*.ckpt*", "samples": "*.jsonl", "rollouts": "*.parquet"}
"""Folder in a run's folder -> pattern of the files that a run writes there."""
OURS = (
    CONFIG, PARENTS, METRICS, RUN_ID, FAILED, ENDING, WANDB_ID, "last_batch.parquet", "curves.png",
    PAGE, "diagnosis.json", "diminishing.json", "diminishing.png", "replay_*.html", *INSIDE, FINAL,
    f"{FINAL}_[0-9]*", "tensorboard", "wandb",
)  # fmt: skip
"""Patterns of the names of all that a run and its exports write in its folder."""


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


# What may be written and deleted.


def check_writable(key: str, outputs: Path, folder: Path) -> None:
    """Raise ConfigError where `folder`, in `outputs` of that key, could not be written into."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        link = f", a symbolic link to {os.readlink(nearest)}," if nearest.is_symlink() else ""
        raise ConfigError(f"{key}={outputs}: {nearest}{link} is no folder that can be written into")


def is_marked(folder: Path) -> bool:
    """Return whether a config.json in a folder names a stage, as that of a run does."""
    with suppress(OSError, ValueError, RecursionError):
        tree = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return isinstance(tree, dict) and isinstance(tree.get("stage"), str)
    return False


def refuse_foreign_files(folder: Path) -> None:
    """Raise ConfigError where a folder holds files and no run: its names may be those of ours."""
    if not folder.is_dir() or is_marked(folder):
        return
    if found := storage.foreign_names(folder, (LOCK, DELETED, RUN_ID, PARENTS, FAILED)):
        way = "move that away, or give another run= or job="
        raise ConfigError(f"{folder} holds {found[0]} and no config.json of a run; {way}")


def leave_failed(folder: Path, reason: str) -> None:
    """Write failed.txt with the reason, in one line, where the folder can be written."""
    # A folder that cannot be written, or holds other files, may be the reason itself.
    with suppress(OSError, RLHFError):
        refuse_foreign_files(folder)
        storage.make_folder(folder)
        with storage.written_whole(folder / FAILED) as temporary:
            temporary.write_text(reason + "\n")


def clear(folder: Path) -> None:
    """Delete what a run and its exports left in a folder; other files, and its lock, stay.

    The folder may be a symbolic link. What is deleted is moved aside first, the configuration last,
    so that a kill leaves no partial run that could be mistaken for another one.
    Raises StorageError, before anything is deleted, where a user's file is among what it would be.
    """
    ours = [n for n in os.listdir(folder) if any(fnmatch(n, pattern) for pattern in OURS)]
    foreign = []
    for name in sorted(n for n in ours if n.startswith(FINAL) or n in INSIDE):
        if not (folder / name).is_dir():
            foreign.append(name)
            continue
        is_inside = name in INSIDE
        others = storage.foreign_names(folder / name, () if is_inside else None)
        foreign += [f"{name}/{n}" for n in others if not (is_inside and fnmatch(n, INSIDE[name]))]
    if foreign:
        raise StorageError(
            f"{folder} was not emptied: {', '.join(foreign)} is no file of a run. Move it away"
        )
    aside = folder / DELETED
    aside.mkdir()
    for name in sorted(ours, key=CONFIG.__eq__):
        os.replace(folder / name, aside / name)
    storage.delete(aside)


def delete_unfinished(folder: Path) -> None:
    """Delete files and folders that a killed process left half written, and failed.txt."""
    for place in (folder, *(folder / name for name in INSIDE)):
        for path in place.glob(f"*{storage.UNFINISHED}"):
            storage.delete(path)
    storage.delete(folder / FAILED)


# config.json: two configurations of a run.

SAVING = ("checkpoint_every", "checkpoint_minutes", "checkpoints_kept")
"""Keys of a stage's section that set when checkpoints are written."""
VOLATILE = (
    "final",  # the section of the stage has its value
    "resume", "overwrite", "preflight", "record", "debug", "samples", "logger", "recipe", "run",
    "job", "outputs", "callbacks", "trainer._target_", "trainer.enable_model_summary",
    "trainer.devices", "trainer.enable_progress_bar", "trainer.max_time", "trainer.num_nodes",
    "trainer.profiler", "trainer.strategy", "rollout_server",
)  # fmt: skip
"""Keys that may differ between two calls of a run: names of its folder, and keys that do not change
its results."""
DECIDES = r"reward\.(components\.[^.]+\.)?(unfit|arguments\.cache)"
"""Pattern of keys that decide whether a run starts, or what it costs, and not what it computes."""


def volatile(stage: Stage) -> tuple[str, ...]:
    """Return the keys that may differ between two calls of a run of the stage."""
    return (*VOLATILE, *(f"{stage.name}.{key}" for key in (*SAVING, *stage.volatile)))


def changes(stage: Stage, tree: dict[str, Any], file: Path) -> list[str]:
    """Return each key in which `tree` differs from the one in `file`, with old and new value."""
    none = "not there"
    then = read_config(file, "overwrite=true starts over")
    keys = differing_keys(then, tree, (*volatile(stage), *stage.unread))
    old, new = ({key: json.dumps(x) for key, x in flatten(one).items()} for one in (then, tree))
    return [f"{key} was {old.get(key, none)}, is {new.get(key, none)}" for key in keys]


def read_config(file: Path, way: str) -> dict[str, Any]:
    """Return the object in a JSON file of a run folder.

    way: advice for a damaged file, appended to the reason.
    Raises CheckpointError where it is missing or damaged.
    """
    try:
        return models.json_object(file)
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{file} ")
        raise CheckpointError(f"{file} is damaged: it {reason}; {way}") from error


def differing_keys(
    one: Mapping[str, Any], other: Mapping[str, Any], ignored: Collection[str]
) -> list[str]:
    """Return the keys in which two configurations differ, except `ignored` keys and nested ones."""
    ours, theirs = flatten(one), flatten(other)
    prefixes = tuple(f"{key}." for key in ignored)
    changed = ours.keys() ^ theirs.keys()
    changed |= {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}
    counted = (key for key in sorted(changed) if not f"{key}.".startswith(prefixes))
    return [key for key in counted if not re.fullmatch(DECIDES, key)]


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return {"a.b": 1} for {"a": {"b": 1}}, with the values as JSON would hold them."""
    if not isinstance(tree, dict):
        return {prefix: json.loads(json.dumps(tree))}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


# ending.json.


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class Value:
    """A metric at the chosen step and at the last one."""

    mode: Mode
    """Direction in which the metric is better: min or max."""
    chosen: float | None
    """Value at the chosen step; None where it was not measured."""
    last: float | None
    """Value at the last step; None where it was not measured."""


@dataclass(frozen=True, kw_only=True, config=validation.STRICT)
class Ending:
    """The end of a run."""

    final: str
    """Rule that chose the step: last, best or its number."""
    step: validation.PositiveInt
    """Step whose model was chosen."""
    last_step: validation.PositiveInt
    """Last step of the run."""
    metrics: dict[str, Value]
    """Metrics that decide which evaluation is the best, by name."""
    stopped: str | None
    """Why the run ended before the last step of its schedule; None where it did not."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """A folder like `final/` that is made from a checkpoint of a run."""

    folder: Path
    """Path of the folder."""
    checkpoint: Path
    """Checkpoint with the weights."""
    origin: Origin
    """Run that wrote the checkpoint."""
    metrics: dict[str, float]
    """Metrics of the evaluation at that step; {} where there was none."""
    ending: Ending
    """Step of the checkpoint, and the metrics there and at the last step."""


def read_ending(folder: Path) -> Ending | None:
    """Return the ending of the run in `folder`; None of one that was cut off.

    Raises CheckpointError where the file is damaged.
    """
    file = folder / ENDING
    try:
        return TypeAdapter(Ending).validate_json(file.read_bytes()) if file.is_file() else None
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key = ".".join(["ending", *map(str, detail["loc"])])
        raise CheckpointError(f"{file} is damaged: {key}: {detail['msg']}") from error


def is_unbegun(folder: Path) -> bool:
    """Return whether no run was started in `folder`, or one that ended before its first step."""
    if not (folder / CONFIG).is_file():
        return True
    batches = (*folder.glob("rollouts/*.parquet"), *folder.glob("last_batch.parquet"))
    steps = any(int(path.stem) for path in numbered(folder / CHECKPOINTS))
    return not ((folder / FINAL).is_dir() or steps or batches or any(read_rows(folder / METRICS)))


# The models that a run starts from, and the configuration that a `final/` was trained with.


NEEDS = {
    "sft": ("starts from an SFT model", "policy.checkpoint=base to start from the model as it is"),
    "rm": ("needs a reward model", "reward=random for a random head that means nothing"),
}
"""Earlier stage -> why a stage reads its model, and what to give to do without."""


def find_parents(settings: Settings) -> dict[str, models.Final]:
    """Return the checkpoints that this stage starts from, by role.

    Among them the reward models that are local folders or were trained by stage=rm.
    """
    stage, given = settings.definition, settings.policy.checkpoint
    if not stage.reads_sft and given not in (None, BASE):
        way = "starts from model.name_or_path; set that instead"
        raise ConfigError(f"policy.checkpoint is {given!r}, but stage={stage.name} {way}")

    def final_of(before: str, checkpoint: str | None, key: str) -> models.Final:
        if checkpoint:
            return models.find(checkpoint, key)
        if (final := earlier(settings, before)) is None:
            need, way = NEEDS[before]
            raise CheckpointError(
                f"stage={stage.name} {need}, and {folder_of(settings, before)} has none. Run "
                f"stage={before} first, or give {key}=FOLDER_OR_HUB_ID, or {way}"
            )
        return final

    found = {}
    if stage.reads_sft and given != BASE:  # without one: the base model itself
        found[SFT] = final_of("sft", given, "policy.checkpoint")
    for name, component in settings.reward.items() if stage.reads_reward else ():
        role, key = reward_role(settings, name), reward_key(settings, name)
        if isinstance(component, HeadConfig):
            found[role] = final_of("rm", component.checkpoint, f"{key}.checkpoint")
        elif isinstance(component, TextModelConfig):
            models.refuse_missing_folder(component.name_or_path, f"{key}.name_or_path")
            if models.is_folder(component.name_or_path):
                found[role] = models.find(component.name_or_path, f"{key}.name_or_path")
    found |= stage.models(settings)
    for final in found.values():
        models.check_weights(final.adapter)
    return found


def reward_role(settings: Settings, name: str) -> str:
    """Return the role of a component of the reward among the roles on the base model."""
    return REWARD if len(settings.reward) == 1 else f"{REWARD}_{name}"


def earlier(settings: Settings, stage: str) -> models.Final | None:
    """Return the `final/` of `stage` of the same job, of one around it, or of the run."""
    around = PurePosixPath(settings.job).parents if settings.job else ()
    for job in (settings.job, *(str(path) for path in around if path.name), None):
        folder = run_folder(settings.outputs, settings.run, settings.model.name, stage, job)
        if (folder / FINAL).is_dir():
            return models.find(str(folder / FINAL), f"{stage} of run={settings.run}")
    return None


@contextmanager
def config_of(final: models.Final) -> Iterator[Mapping[str, Any]]:
    """Yield the configuration that a model was trained with; errors in it name its manifest.

    Raises CheckpointError where there is no manifest, or a value is missing or not allowed.
    """
    if final.manifest is None:
        raise CheckpointError(f"{final.path} has no manifest.json; allowed: the final/ of a run")
    try:
        yield final.manifest.config
    except ConfigError as error:
        raise CheckpointError(f"{final.path / models.MANIFEST}: config: {error}") from error


def trained_as(final: models.Final) -> tuple[ModelConfig, Mapping[str, Any]]:
    """Return the base model and the chat template's arguments from a manifest."""
    key = "chat_template_kwargs"
    with config_of(final) as config:
        arguments = section(config, "data", key)[key]
        validation.check_value(f"data.{key}", arguments, validation.Options)
        return validation.build(ModelConfig, section(config, "model"), "model"), arguments


def sampled_as(final: models.Final) -> tuple[float, int]:
    """Return temperature and largest number of tokens with which a model was trained to respond.

    The temperature is 1, the model's own distribution, where its stage samples nothing.
    """
    key, stage = "max_response_tokens", "" if final.manifest is None else final.manifest.stage
    with config_of(final) as config:
        sampling = {"temperature": 1.0, **section(config, "data", key), **section(config, stage)}
        kinds = {"temperature": validation.Temperature, key: validation.PositiveInt}
        for name, kind in kinds.items():
            validation.check_value(f"{stage}.{name}", sampling[name], kind)
    return sampling["temperature"], sampling[key]
