"""The plan of a replay, and checks of the files it needs before a model loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lightning_rlhf.callbacks.checkpoint_files import (
    check_checkpoint,
    read_run,
)
from lightning_rlhf.core.errors import CheckpointError, ConfigError, DataError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.rollouts import (
    FOLDER,
    UPDATES,
    file_of,
    read_recorded,
    recorded_iterations,
    weights_of,
)
from lightning_rlhf.io.nearest_path import nearest_path
from lightning_rlhf.io.user_code import code_of_command
from lightning_rlhf.models.weights import attention_of_the_hub
from lightning_rlhf.stages.folder.changes import read_config
from lightning_rlhf.stages.folder.folders import CONFIG, check_kinds, is_stale, run_folder
from lightning_rlhf.stages.folder.recorded import checkpoint_until, not_recorded, ranges
from lightning_rlhf.stages.folder.resume import origin
from lightning_rlhf.stages.registry import STAGES, chosen_stage, stage_names
from lightning_rlhf.stages.settings import read_tree
from lightning_rlhf.stages.stage import Settings, TrainerConfig


@dataclass(frozen=True)
class Plan:
    """Updates to run again, and the state from which they start."""

    folder: Path
    settings: Settings
    """Settings of the run."""
    iteration: int
    """Last iteration to run, which is shown; the first is 1."""
    start: int
    """Number of finished iterations at the start of the replay."""
    checkpoint: Path | None
    """Checkpoint to start from; None starts as the run started."""
    weights: Path | None = None
    """Weights from the end of the run with which the iteration is shown where no update can be run;
    None where updates are run."""

    @property
    def iterations(self) -> range:
        """Return the iterations that are run, counted from 1."""
        return range(self.start + 1, self.iteration + 1)


def plan_replay(folder: Path, settings: Settings, iteration: int | None) -> Plan:
    """Return the plan for an iteration of the run in `folder`; None is the newest recorded one.

    settings: settings of the run, from `settings_of`.

    Raises:
        ConfigError, CheckpointError: the folder holds no run of PPO, or its start is missing.
        DataError: an iteration that is needed is not recorded, or its file is damaged.
    """
    recorded = recorded_iterations(folder)
    if not recorded:
        raise DataError(
            f"{folder / FOLDER} holds no recorded iteration; record=true writes them while "
            "stage=ppo runs"
        )
    iteration = recorded[-1] if iteration is None else iteration
    if iteration not in recorded:
        raise DataError(
            f"iteration {iteration} of {folder} is not recorded; recorded are {ranges(recorded)}"
        )
    start, checkpoint = checkpoint_until(folder, iteration - 1)
    missing, weights = not_recorded(folder, start, iteration), weights_of(folder, iteration)
    if missing and weights.is_file():
        check_origin(folder, None, settings)
        updates_before(weights)
        check_recorded(folder, iteration, settings)
        return Plan(folder, settings, iteration, iteration - 1, None, weights)
    if missing:
        begin = "the start" if checkpoint is None else str(checkpoint)
        raise DataError(
            f"iteration {iteration} of {folder} cannot be replayed: the way there from {begin} "
            f"leads over {ranges(missing)}, not recorded; recorded are {ranges(recorded)}"
        )
    plan = Plan(folder, settings, iteration, start, checkpoint)
    check_origin(folder, checkpoint, settings)
    for number in plan.iterations:
        check_recorded(folder, number, settings)
    return plan


def check_recorded(folder: Path, iteration: int, settings: Settings) -> None:
    """Raise DataError unless the file is complete and belongs to the iteration and such a run."""
    path, config = file_of(folder, iteration), settings.config
    assert isinstance(config, PPOConfig)
    found = read_recorded(path)
    for what, is_, was in (
        ("iteration", found.iteration, iteration),
        ("number of responses", len(found.responses), config.rollout_batch_size),
        ("critic", found.has_critic, config.has_critic),
        ("reward's components", [*found.components], [*settings.reward]),
    ):
        if is_ != was:
            raise DataError(f"{path} is not of this run: its {what} is {is_}, the run's {was}")


def updates_before(weights: Path) -> int:
    """Return the number of updates of the iteration that are in the weights.

    Raises CheckpointError where the file is damaged.
    """
    try:
        with safe_open(weights, "pt") as file:
            updates = int(file.metadata()[UPDATES])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{weights} cannot be read: {error!r}") from error
    if updates < 1:
        raise CheckpointError(f"{weights} cannot be read: it is of {updates} updates")
    return updates


def check_origin(folder: Path, checkpoint: Path | None, settings: Settings) -> None:
    """Raise CheckpointError unless the checkpoint is of the run, and its models are unchanged.

    checkpoint: None starts as the run started.
    """
    if checkpoint is not None:
        # A run of another version may be replayed; differences of its results are reported.
        version = read_run(checkpoint)["version"]
        check_checkpoint(checkpoint, replace(origin(settings), version=version))
    if is_stale(settings):
        raise CheckpointError(
            f"{folder} cannot be replayed: the models that it was started from are others now"
        )


@code_of_command()
def settings_of(folder: Path, *, trust_remote_code: bool = False) -> Settings:
    """Return the settings of the run in `folder`; earlier stages are looked for beside it.

    trust_remote_code: whether code that models bring may be executed. Other code that the run's
    configuration names is not: see `code_of_command`.
    Raises ConfigError where there is no training run, or one with code that may not be executed;
    CheckpointError where its file is damaged.
    """
    file = folder / CONFIG
    check_kinds(folder)
    if not file.is_file():
        found = f"is no run: it has no {CONFIG}" if folder.is_dir() else "does not exist"
        beside = sorted(path.parent.name for path in folder.parent.glob(f"*/{CONFIG}"))
        runs = f"; runs beside it: {', '.join(beside)}" if beside else nearest_path(str(folder))
        raise ConfigError(
            f"{folder} {found}; allowed: the folder of a run of stage=ppo, sft or rm, as "
            f"outputs/<run>/<model>/ppo{runs}"
        )
    tree = read_config(file, "replay has to know the configuration of the run")
    if "stage" not in tree or tree["stage"] not in stage_names(tree):
        raise CheckpointError(f"{file} is damaged: it names no stage")
    if not trust_remote_code:
        refuse_code(tree, file)
    stage = tree["stage"]
    if chosen_stage(tree).replays is None:
        known = ", ".join(name for name in STAGES if STAGES[name].replays)
        raise ConfigError(f"{folder} is a run of stage={stage}; allowed: one of stage={known}")
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
    for key, value in [*trusting(tree), *attention_of_the_hub(tree)]:
        raise ConfigError(
            f"{file} asks for code that a model brings: {key} is {value!r}. Replay runs it with "
            "--trust-remote-code alone, which is for folders that you trust"
        )


def trusting(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each trust_remote_code, nested ones included, that is not false."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from trusting(value, f"{prefix}{key}.")
        elif key == "trust_remote_code" and value is not False:
            yield f"{prefix}{key}", value
