"""Starts a stage: errors in names and folders are raised before the slow imports."""

from __future__ import annotations

from pathlib import Path

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.readers import check_sources
from lightning_rlhf.io.user_code import check_file
from lightning_rlhf.models.adapter import refuse_missing_folder
from lightning_rlhf.models.config import BASE, SFT
from lightning_rlhf.parallel.world import World, world
from lightning_rlhf.rewards.config import FunctionConfig
from lightning_rlhf.stages.final import check_final
from lightning_rlhf.stages.folder.folders import (
    FINAL,
    delete_unfinished,
    find_parents,
    folder_of,
    is_complete,
)
from lightning_rlhf.stages.folder.resume import check_resumable, decide, held, resume_point
from lightning_rlhf.stages.registry import STAGES
from lightning_rlhf.stages.stage import AUTO, Settings, reward_key


def run_stage(settings: Settings) -> Path:
    """Run the stage and return the path of its `final/` folder.

    It is to be called in each of the processes that torchrun or srun started.
    """
    check_processes(settings, world())
    if world().size > 1:
        from lightning_rlhf.stages.run import run_replica

        return run_replica(settings, begin)
    with held(settings, folder_of(settings)):
        begun = begin(settings)
        if begun is None:
            return folder_of(settings) / FINAL
        # Lightning, transformers and torch take ten seconds of processor time to import.
        from lightning_rlhf.stages.run import run_in_folder

        return run_in_folder(begun)


def begin(settings: Settings) -> Settings | None:
    """Return the settings with which the run starts or resumes; None where it has finished.

    Raises an RLHFError where its folder, its checkpoint or its inputs do not allow it.
    """
    if settings.resume == AUTO:
        if (decided := decide(settings)) is None:
            complete(settings)
            return None
        resume_point(decided)  # the checkpoint is already checked
        check_inputs(decided)
        return decided
    checkpoint = resume_point(settings)
    check_inputs(settings)
    if checkpoint is not None:
        check_resumable(checkpoint, settings)
    return settings


def complete(settings: Settings) -> None:
    """Write the page of a finished run that was killed before it had one, and delete what is left
    half written."""
    if not is_complete(folder_of(settings)):
        from lightning_rlhf.stages.run_report import leave_report  # which takes seconds to import

        delete_unfinished(folder_of(settings))
        leave_report(folder_of(settings), settings.definition)


def check_processes(settings: Settings, place: World) -> None:
    """Raise ConfigError unless the run has as many processes as its configuration says.

    place: place of this process among those of the run.
    """
    trainer, stage = settings.trainer, settings.stage
    if place.size == 1 and not settings.definition.trains:
        return  # it can compute in one process, whatever trainer.devices is
    if place.size != trainer.processes:
        found = f"{place.size} processes" if place.size > 1 else "one process"
        raise ConfigError(
            f"trainer.devices is {trainer.devices} and trainer.num_nodes is {trainer.num_nodes}, "
            f"but {place.launcher or 'this command'} has started {found}; allowed: equal numbers"
        )
    if place.size == 1:
        return
    if not settings.definition.runs_in_processes:
        raise ConfigError(
            f"{place.launcher} has started {place.size} processes, but stage={stage} computes in "
            "one; allowed: one process"
        )
    config, size = settings.config, place.size
    if isinstance(config, PPOConfig) and config.prompts_per_iteration < size:
        raise ConfigError(
            f"{stage}.rollout_batch_size is {config.rollout_batch_size}, which is "
            f"{config.prompts_per_iteration} prompts for {size} processes; allowed: at least "
            f"{size * config.samples_per_prompt}"
        )


def check_run(settings: Settings) -> None:
    """Prepare the stage, check it before its first update, and print what was found.

    No file is written, and the folder of the run may hold a run already.
    Raises an RLHFError where the stage cannot start or a check fails.
    """
    require_buildable(settings, "checked")
    check_inputs(settings)
    from lightning_rlhf.stages.run import check_in_memory  # which imports torch

    check_in_memory(settings)


def plan_run(settings: Settings) -> None:
    """Print the memory plan of the stage; no weights, data or earlier stages are read.

    Raises an RLHFError where the stage has none, or the model's configuration cannot be read.
    """
    check_trained_weights(settings)
    from lightning_rlhf.stages.console import quiet_libraries
    from lightning_rlhf.stages.preflight.memory_plan import print_plan  # which imports torch

    quiet_libraries()
    print_plan(settings)


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
    if isinstance(settings.config, PPOConfig) and settings.config.ptx_coef > 0:
        check_sources(settings.data, "demonstrations")
    if stage.reads_judge and settings.data.judge:
        check_file(settings.data.judge, "data.judge")
    if isinstance(settings.config, PPOConfig) and ":" in settings.config.rollout:
        check_file(settings.config.rollout, f"{stage.name}.rollout", "class")
    if stage.reads_reward:
        for name, component in settings.reward.items():
            if isinstance(component, FunctionConfig):
                check_file(component.path, f"{reward_key(settings, name)}.path")
