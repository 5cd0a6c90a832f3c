"""The models that a run starts from, and the configuration that a `final/` was trained with."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.core.validation import Options, PositiveInt, Temperature, build, check_value
from lightning_rlhf.models.checkpoint import (
    MANIFEST,
    Final,
    check_weights,
    find,
    is_folder,
    refuse_missing_folder,
)
from lightning_rlhf.models.config import BASE, REWARD, SFT, ModelConfig
from lightning_rlhf.rewards.config import HeadConfig, TextModelConfig
from lightning_rlhf.runs.folders import FINAL, folder_of, run_folder
from lightning_rlhf.runs.stage import Settings, reward_key, section


def find_parents(settings: Settings) -> dict[str, Final]:
    """Return the checkpoints that this stage starts from, by role.

    Among them the reward models that are local folders or were trained by stage=rm.
    """
    stage, given = settings.definition, settings.policy.checkpoint
    if not stage.reads_sft and given not in (None, BASE):
        raise ConfigError(
            f"policy.checkpoint is {given!r}, but stage={stage.name} starts from "
            "model.name_or_path; set that instead"
        )

    def found_or(checkpoint: str | None, key: str, before: str, need: str, ways: str) -> Final:
        if checkpoint:
            return find(checkpoint, key)
        if (final := earlier(settings, before)) is None:
            where = folder_of(settings, before)
            raise CheckpointError(f"stage={stage.name} {need}, and {where} has none. {ways}")
        return final

    found = {}
    if stage.reads_sft and given != BASE:  # without one: the base model itself
        found[SFT] = found_or(
            given, "policy.checkpoint", "sft", "starts from an SFT model", "Run stage=sft first, "
            "or give policy.checkpoint=FOLDER_OR_HUB_ID, or policy.checkpoint=base to start from "
            "the model as it is",
        )  # fmt: skip
    for name, component in settings.reward.items() if stage.reads_reward else ():
        role, key = reward_role(settings, name), reward_key(settings, name)
        if isinstance(component, HeadConfig):
            key = f"{key}.checkpoint"
            found[role] = found_or(
                component.checkpoint, key, "rm", "needs a reward model", "Train one with stage=rm, "
                f"or give {key}=FOLDER_OR_HUB_ID, or reward=random for a random head that means "
                "nothing",
            )  # fmt: skip
        elif isinstance(component, TextModelConfig):
            refuse_missing_folder(component.name_or_path, f"{key}.name_or_path")
            if is_folder(component.name_or_path):
                found[role] = find(component.name_or_path, f"{key}.name_or_path")
    found |= stage.models(settings)
    for final in found.values():
        check_weights(final.adapter)
    return found


def reward_role(settings: Settings, name: str) -> str:
    """Return the role of a component of the reward among the roles on the base model."""
    return REWARD if len(settings.reward) == 1 else f"{REWARD}_{name}"


def earlier(settings: Settings, stage: str) -> Final | None:
    """Return the `final/` of `stage` of the same job, of one around it, or of the run."""
    around = PurePosixPath(settings.job).parents if settings.job else ()
    for job in (settings.job, *(str(path) for path in around if path.name), None):
        folder = run_folder(settings.outputs, settings.run, settings.model.name, stage, job)
        if (folder / FINAL).is_dir():
            return find(str(folder / FINAL), f"{stage} of run={settings.run}")
    return None


@contextmanager
def config_of(final: Final) -> Iterator[Mapping[str, Any]]:
    """Yield the configuration that a model was trained with; errors in it name its manifest.

    Raises CheckpointError where there is no manifest, or a value is missing or not allowed.
    """
    if final.manifest is None:
        raise CheckpointError(f"{final.path} has no {MANIFEST}; allowed: the final/ of a run")
    try:
        yield final.manifest.config
    except ConfigError as error:
        raise CheckpointError(f"{final.path / MANIFEST}: config: {error}") from error


def trained_as(final: Final) -> tuple[ModelConfig, Mapping[str, Any]]:
    """Return the base model and the chat template's arguments from a manifest."""
    key = "chat_template_kwargs"
    with config_of(final) as config:
        arguments = section(config, "data", key)[key]
        check_value(f"data.{key}", arguments, Options)
        return build(ModelConfig, section(config, "model"), "model"), arguments


def sampled_as(final: Final) -> tuple[float, int]:
    """Return temperature and largest number of tokens with which a model was trained to respond.

    The temperature is 1, the model's own distribution, where its stage samples nothing.
    """
    key, stage = "max_response_tokens", "" if final.manifest is None else final.manifest.stage
    with config_of(final) as config:
        sampling = {"temperature": 1.0, **section(config, "data", key), **section(config, stage)}
        check_value(f"{stage}.temperature", sampling["temperature"], Temperature)
        check_value(f"{stage}.{key}", sampling[key], PositiveInt)
    return sampling["temperature"], sampling[key]


def reward_of(finals: Sequence[Final]) -> str | None:
    """Return the reward model that one of the models was trained on, where it is there."""
    folders = (final.parent("reward") for final in finals)
    return next((str(folder) for folder in folders if folder and folder.is_dir()), None)
