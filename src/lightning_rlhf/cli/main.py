"""The command: compose the configuration with Hydra, then run each job that it describes."""

import contextlib
import io
import logging
import os
import pkgutil
import re
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import lightning_rlhf
from lightning_rlhf.callbacks.files import numbered
from lightning_rlhf.callbacks.stop import Stopped
from lightning_rlhf.cli import arguments, launch, recipe, sweep
from lightning_rlhf.core import errors
from lightning_rlhf.data.readers import ENDINGS
from lightning_rlhf.io import storage, user_code
from lightning_rlhf.io.console import print_line, visible
from lightning_rlhf.parallel.world import IN_LAUNCHER, end_with, leave_run, world
from lightning_rlhf.runs import console, folders
from lightning_rlhf.runs.folders import FINAL
from lightning_rlhf.runs.resume import state_of
from lightning_rlhf.runs.settings import folder_names, plain, read_settings
from lightning_rlhf.runs.stage import AUTO, STAGES, Settings, stage_names

NEXT = {"sft": ("rm", "preferences"), "rm": ("ppo", "prompts"), "ppo": ("eval_policy", "prompts"),
        "dpo": ("eval_policy", "prompts"), "eval_reward": ("ppo", "prompts")}  # fmt: skip
"""Stage -> the one that follows it, and the data that this one reads."""
ONCE = ("stage", "final", "resume", "overwrite", "preflight", "record")
"""Keys of a command that are not those of the next one."""


def main() -> None:
    """Run train.py or the console command."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    leave_run()
    if IN_LAUNCHER in os.environ or world().launcher == "torchrun":
        end_with(int(os.environ.get(IN_LAUNCHER, os.getppid())))
    if world().rank > 0:  # another process prints the same; tracebacks remain
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        warnings.simplefilter("ignore")
    words = sys.argv[1:]
    first, *rest = words or [""]
    try:
        if first in arguments.COMMANDS:
            module, name = arguments.COMMANDS[first], first.replace("-", "_")
            home = os.path.expanduser("~")  # a shell leaves ~ as it is in --out=~/page.html
            rest = [re.sub(r"^(--[\w-]+=)?~(?=/|$)", lambda x: x[0][:-1] + home, w) for w in rest]
            # What the folders that it reads name is not run.
            with user_code.code_of_command(), storage.storage_errors():
                pkgutil.resolve_name(f"lightning_rlhf.cli.{module}:{name}")(rest)
        elif words == ["--version"]:
            print(f"lightning-rlhf {lightning_rlhf.__version__}")
        else:
            mode = arguments.WITHOUT_RUN.get(first)
            with prepared(words if mode is None else [*rest, f"preflight={mode}"]):
                compose()
    except errors.RLHFError as error:
        console.print_error(arguments.without_secrets(str(error)))
        sys.exit(1)
    except Exception as error:
        if first in arguments.COMMANDS:
            raise
        if "debug=true" in words:
            text = arguments.without_secrets(traceback.format_exc(), words)
            print(visible(text), file=sys.stderr)
        console.print_error(arguments.composition_error(error, words))
        sys.exit(1)


@contextlib.contextmanager
def prepared(words: Sequence[str]) -> Iterator[None]:
    """Set Hydra up for a command line; remove secrets from what it prints where it runs no job."""
    register_resolvers()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # this program prints Hydra's errors itself
    given = arguments.parse_arguments(words)
    typed = os.environ.get("COMP_LINE", "").split(" ")[-1]
    if given.shell_completion and typed.startswith("stage="):  # Hydra knows no choices of it
        print(*(f"stage={name}" for name in STAGES), sep="\n")
        sys.exit()
    arguments.check_command(words, given)
    # Hydra's parser needs the overrides on one side of the options.
    sys.argv[1:] = [*given.overrides, *(word for word in words if word not in given.overrides)]
    printed, is_printed = io.StringIO(), given.cfg or given.info or given.help or given.hydra_help
    try:
        with contextlib.redirect_stdout(printed) if is_printed else contextlib.nullcontext():
            yield
    finally:
        print(visible(arguments.without_secrets(printed.getvalue(), given.overrides)), end="")


def register_resolvers() -> None:
    """Register the resolvers and the configuration that conf/ refers to.

    `${recipes:path}` is a path inside recipes/, `${program:}` the command's name, `${hub_val:name}`
    a data set to validate on (null beside a local file to train on),
    `${by_finetune:{lora:A,full:B}}` A or B, as the key `finetune` beside it says, `${by_loss_type:
    {any:A,kto:B}}` likewise, where A is that of all losses that are not named, and the
    configuration `open` a mapping that takes any key on the command line.
    """

    def by_key(key: str, other: str) -> Callable[..., Any]:
        return lambda values, *, _parent_: values.get(_parent_.get(key), values[other])

    resolvers: dict[str, Any] = {
        "by_finetune": by_key("finetune", "lora"),
        "by_loss_type": by_key("loss_type", "any"),
        "hub_val": lambda x, *, _parent_: None if str(_parent_.train).endswith(ENDINGS) else x,
        "program": arguments.program_name,
        "recipes": lambda path: str(console.RECIPES / path),
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    ConfigStore.instance().store("open", OmegaConf.create({}, flags={"struct": False}))


@hydra.main(version_base="1.3", config_path=str(console.CONF), config_name="config")
def compose(cfg: DictConfig) -> str | None:
    """Run one job that Hydra composed. Return why a sweep's job failed, else None."""
    sys.argv[1:] = map(arguments.without_address, sys.argv[1:])  # W&B records it
    register_resolvers()  # a launcher may have started this process
    job: Any = HydraConfig.get()
    overrides: Any = OmegaConf.to_container(job.overrides.task)  # as typed
    from_sweep = job.mode == RunMode.MULTIRUN
    # The variable is that of this process alone.
    in_sweep = from_sweep or os.environ.pop(sweep.IN_SWEEP, None) is not None
    logger: Any = cfg.get("logger") or {}
    is_free = logger.get("kind") == "wandb" and logger.get("group") is None
    if in_sweep and is_free and not os.getenv("WANDB_RUN_GROUP"):
        logger.group = str(cfg.run)  # the jobs of a sweep are one group of W&B
    # The command prints how such a job ended; Ctrl-C is for the command, which passes it on.
    is_apart = from_sweep and job.launcher._target_ != sweep.BASIC
    if is_apart and not sweep.is_sweeper():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    secrets = arguments.secrets_of(OmegaConf.to_container(cfg))
    with contextlib.suppress(OmegaConfBaseException):  # which the job itself reports
        secrets |= arguments.secrets_of(OmegaConf.to_container(cfg, resolve=True))
    try:
        if is_apart:
            return sweep.run_job(cfg, overrides)
        with storage.storage_errors():
            execute(cfg, overrides, in_sweep)
    except (KeyboardInterrupt, Stopped) as stop:
        if launch.IN_RECIPE not in os.environ:
            print("; ".join(["stopped", *how_to_go_on(cfg, in_sweep)]))
        sys.exit(128 + (stop.signum if isinstance(stop, Stopped) else signal.SIGINT))
    except Exception as error:
        is_ours = isinstance(error, errors.RLHFError)
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        message = visible(arguments.without_secrets(text, secrets=secrets))
        if not is_ours or cfg.get("debug") is True:
            # Printed here, since Hydra would also print the overrides, with passwords in them.
            trace = visible(arguments.without_secrets(traceback.format_exc(), secrets=secrets))
            print(trace, file=sys.stderr, end="")
        if is_ours and not is_apart and not isinstance(error, errors.PrintedError):
            is_cut_off = isinstance(error, errors.RewardError | errors.StorageError)
            advice = how_to_go_on(cfg, in_sweep) if is_cut_off else []
            console.print_error("; ".join([message, *advice]))
        if in_sweep:
            message = sweep.mark_failed(cfg, message)
        if not from_sweep:
            sys.exit(1)
        return message
    return None


def how_to_go_on(cfg: DictConfig, in_sweep: bool) -> list[str]:
    """Return how to resume a stopped run; an empty list where there is nothing to resume."""
    if in_sweep or cfg.recipe is not None:
        return [f"the same command{', without overwrite=true,' * bool(cfg.overwrite)} goes on"]
    with contextlib.suppress(errors.RLHFError):
        settings = read_settings(cfg)
        folder = folders.folder_of(settings)
        if (folder / folders.CONFIG).is_file() and not (folder / folders.FINAL).is_dir():
            if settings.resume == AUTO:
                return ["the same command goes on"]
            if saved := numbered(folder / folders.CHECKPOINTS):
                return [f"resume=auto goes on from the checkpoint of step {int(saved[-1].stem)}"]
            is_new = folders.is_unbegun(folder)
            return [f"{'the same command' if is_new else 'resume=auto'} starts it over"]
    return []


def execute(cfg: DictConfig, overrides: Sequence[str], in_sweep: bool) -> None:
    """Run the recipe, or the stage; a repeated sweep runs only the jobs that are not finished."""
    name, stage = (
        OmegaConf.select(cfg, key, throw_on_resolution_failure=False) for key in ("recipe", "stage")
    )
    if name is not None:
        if stage is not None:
            raise errors.ConfigError(f"recipe={name} runs its own stages; leave out stage=")
        arguments.refuse_processes("a recipe")
        folder_names(plain(cfg))
        recipe.run(name, cfg, overrides)
        return
    names = stage_names(OmegaConf.to_container(cfg))  # type: ignore[arg-type]
    if not in_sweep and stage in names:
        arguments.refuse_other_stages(stage, overrides, names)
    settings = read_settings(cfg)
    from lightning_rlhf.stages import fit, memory_plan  # importing torch takes ten seconds

    if settings.preflight in ("plan", "only"):
        (memory_plan.print_plan if settings.preflight == "plan" else fit.check)(settings)
        return
    if in_sweep and not settings.overwrite:
        state = state_of(settings)
        if state == "done":
            fit.complete(settings)
            return
        resume = (settings.resume or AUTO) if state == "cut off" else False
        settings = replace(settings, resume=resume, overwrite=state == "outdated")
    trainer, definition = settings.trainer, settings.definition
    is_alone = not in_sweep and launch.IN_RECIPE not in os.environ
    if is_alone and not settings.resume:
        print_line(f"{settings.stage}: {folders.folder_of(settings)}", "bold")
    # Without processes on the other machines, a stage that does not train computes in this one.
    is_startable = definition.trains or (definition.divides and trainer.num_nodes == 1)
    if trainer.processes > 1 and world().size == 1 and is_startable:
        launch.run_processes(settings, overrides)
    else:
        fit.fit(settings)
    words = next_words(settings, overrides) if is_alone and settings.stage != "rank" else []
    if words and words != ["chat"]:  # which needs a model
        line = f"next: {arguments.program_name()} {shlex.join(words)}"
        print_line(arguments.without_secrets(line, overrides), is_command=True)


def next_words(settings: Settings, overrides: Sequence[str]) -> list[str]:
    """Return the words of the command that follows a stage which was run with the overrides."""
    models = ("sft", "ppo", "dpo") if settings.stage == "eval_policy" else ("sft", settings.stage)
    if settings.stage not in NEXT or (settings.stage == "dpo" and not final_of(settings, "rm")):
        return ["chat", *filter(None, (final_of(settings, name) for name in models))]
    (following, data), config = NEXT[settings.stage], settings.config
    words = [*launch.own_configs(), f"stage={following}"]
    given = [o for o in arguments.parse_overrides(overrides) if o.key_or_group not in ONCE]
    owners = [arguments.stage_of(override, STAGES) for override in given]
    words += [str(o.input_line) for o, owner in zip(given, owners, strict=True) if owner is None]
    if settings.stage == "ppo" and "ppo" in owners:  # the policy samples as in its training
        keys = ("temperature", "max_response_tokens")
        words += [f"eval_policy.{key}={getattr(config, key)}" for key in keys]
        stops = ",".join(map(launch.override_value, config.stop_strings))
        words += [f"eval_policy.stop_strings=[{stops}]"] if stops else []
    if getattr(settings.data, data).train is None:
        words.append(f"data.{data}.train=FILE.jsonl")
    if following == "eval_policy" and (folders.folder_of(settings, following) / FINAL).is_dir():
        words.append("overwrite=true")  # of an evaluation, which is soon made again
    return words


def final_of(settings: Settings, stage: str) -> str:
    """Return the path of the final/ of a stage of the job, else of the run; "" without any."""
    places = (folders.folder_of(x, stage) / FINAL for x in (settings, replace(settings, job=None)))
    return next((str(place) for place in places if place.is_dir()), "")
