"""Starts a stage: errors in names and folders are raised before the slow imports."""

from __future__ import annotations

from pathlib import Path

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.splits import check_sources
from lightning_rlhf.io.user_code import check_file
from lightning_rlhf.models.config import BASE, SFT
from lightning_rlhf.models.weights import refuse_missing_folder
from lightning_rlhf.rewards.config import FunctionConfig
from lightning_rlhf.stages.final import check_final
from lightning_rlhf.stages.folder.extend import check_longer
from lightning_rlhf.stages.folder.folders import FINAL, find_parents, folder_of
from lightning_rlhf.stages.folder.resume import check_resumable, decide, held, resume_point
from lightning_rlhf.stages.registry import STAGES
from lightning_rlhf.stages.stage import AUTO, Settings, reward_key


def run_stage(settings: Settings) -> Path:
    """Run the stage and return the path of its `final/` folder."""
    with held(settings, folder_of(settings)):
        if settings.resume == AUTO:
            if (decided := decide(settings)) is None:
                return folder_of(settings) / FINAL
            settings = decided  # the checkpoint is already checked
            resume_point(settings)
            check_inputs(settings)
        else:
            checkpoint = resume_point(settings)
            check_inputs(settings)
            if checkpoint is not None:
                check_resumable(checkpoint, settings)
                if isinstance(settings.config, PPOConfig):  # others know their steps from the data
                    check_longer(settings, checkpoint, settings.config.iterations)
        # Lightning, transformers and torch take ten seconds of processor time to import.
        from lightning_rlhf.stages.run import run_in_folder

        return run_in_folder(settings)


def check_run(settings: Settings) -> None:
    """Prepare the stage, check it before its first update, and print what was found.

    No file is written, and the folder of the run may hold a run already.
    Raises an RLHFError where the stage cannot start or a check fails.
    """
    require_buildable(settings, "checked")
    check_inputs(settings)
    from lightning_rlhf.stages.run import check_in_memory  # which imports torch

    check_in_memory(settings)


def require_buildable(settings: Settings, done: str) -> None:
    """Raise ConfigError unless the stage's description has `prepare`.

    done: participle of what is to be done with the stage, for the message.
    """
    if settings.definition.prepare is None:
        allowed = ", ".join(name for name, stage in STAGES.items() if stage.prepare is not None)
        raise ConfigError(
            f"stage={settings.stage} cannot be {done}: its description has no `prepare`; allowed: "
            f"{allowed}, or a stage of your own that has it"
        )


def check_trained_weights(settings: Settings) -> None:
    """Raise ConfigError where the stage trains whole weights that would be quantised."""
    quantization = settings.model.quantization
    for key, whole, others in (("finetune", "full", "lora"), ("critic", "model", "head, adapter")):
        if quantization != "none" and getattr(settings.config, key, None) == whole:
            key = f"{settings.stage}.{key}"
            raise ConfigError(
                f"{key} is '{whole}', which trains whole weights, but model.quantization is "
                f"'{quantization}'; allowed: {key}={others}, or model.quantization=none"
            )


def check_inputs(settings: Settings) -> None:
    """Raise an RLHFError unless the models, files and folders that the stage reads exist."""
    stage = settings.definition
    if not stage.reads_sft and settings.policy.checkpoint not in (None, BASE):
        raise ConfigError(
            f"policy.checkpoint is {settings.policy.checkpoint!r}, but stage={stage.name} starts "
            "from model.name_or_path; set that instead"
        )
    check_trained_weights(settings)
    parents = find_parents(settings)
    if stage.check is not None:
        stage.check(settings, parents)
    if SFT not in parents:
        for name in ("name_or_path", "tokenizer"):
            if (source := getattr(settings.model, name)) is not None:
                refuse_missing_folder(source, f"model.{name}")
    if stage.trains:
        config = settings.config
        check_final(settings, config.iterations if isinstance(config, PPOConfig) else None)
    check_sources(settings.data, stage.data)
    if stage.reads_judge and settings.data.judge:
        check_file(settings.data.judge, "data.judge")
    if isinstance(settings.config, PPOConfig) and ":" in settings.config.rollout:
        check_file(settings.config.rollout, "ppo.rollout", "class")
    if stage.reads_reward:
        for name, component in settings.reward.items():
            if isinstance(component, FunctionConfig):
                check_file(component.path, f"{reward_key(settings, name)}.path")
