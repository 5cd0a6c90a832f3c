"""The arguments of a command: Hydra's options, and overrides as Hydra itself parses them."""

from __future__ import annotations

import difflib
import os
import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, NoReturn

from hydra import compose

# The parser of @hydra.main; Hydra has no public name for it.
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from lightning_rlhf.cli.secrecy import without_address, without_secrets
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.parallel.world import world
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.paths import CONF

GROUPS = ("model", "data", "reward", "trainer", "logger", "callbacks", "advantage")
"""Groups of conf/ from which one file each is chosen."""
CHOICE = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*(?<!\.yaml)(?<!\.yml)")
"""Pattern of the name of a file in a group of conf/, or in a folder below it."""
COMMANDS = {
    "chat": "lightning_rlhf.cli.chat:chat",
    "compare": "lightning_rlhf.cli.commands:compare",
    "dashboard": "lightning_rlhf.cli.commands:dashboard",
    "diminishing": "lightning_rlhf.cli.commands:diminishing",
    "export": "lightning_rlhf.cli.export:export",
    "replay": "lightning_rlhf.cli.replay:replay",
    "report": "lightning_rlhf.cli.commands:report",
    "serve-reward": "lightning_rlhf.cli.serve:serve_reward",
}
"""First word of a command that composes no configuration -> the function that runs the rest."""
WITHOUT_RUN = {"check": "only", "plan": "plan"}
"""First word of a command that checks a stage or plans its memory, without training -> value of
`preflight` that does the same."""
ALIKE = 0.7
"""Likeness, from 0 to 1, from which a word is taken for a mistyped command."""
PLUGINS = {
    "hydra/launcher=joblib": "hydra_plugins.hydra_joblib_launcher",
    "hydra/launcher=submitit_local": "hydra_plugins.hydra_submitit_launcher",
    "hydra/launcher=submitit_slurm": "hydra_plugins.hydra_submitit_launcher",
    "hydra/sweeper=optuna": "optuna",
}
"""Choice of a launcher or a sweeper -> the module that it needs, of an optional package."""
READ_BY = {"advantage": "ppo"}
"""Group whose file becomes part of a stage's section -> the stage."""

TRIAL = "callbacks.trial"
"""Key of the callback with which a trial of a study reports; it is no part of a job's name."""


def check_command(first: Sequence[str], given: Namespace) -> None:
    """Raise ConfigError for a mistyped command, or for a sweep or a recipe that cannot be run.

    That is one whose checks or plan alone are wanted, as its stages start from what earlier ones
    have trained; one that lacks a package or a program; or one in several processes, each of which
    would run all its jobs. Prints a warning where a launcher or a sweeper is chosen for no sweep.

    first: the first word of the command line, if it has any; an override has a "=" in it.
    """
    commands = [*COMMANDS, *WITHOUT_RUN]
    for word in first:
        close = difflib.get_close_matches(word, commands, n=1, cutoff=ALIKE)
        if close and "=" not in word:
            raise ConfigError(f"{word} is no command; did you mean {close[0]}?")
    is_recipe = any(key_of(word) == "recipe" for word in given.overrides)
    for command, mode in WITHOUT_RUN.items():
        if f"preflight={mode}" in given.overrides and (given.multirun or is_recipe):
            raise ConfigError(
                f"{'recipe=NAME' if is_recipe else '-m'} runs several stages or jobs, and a "
                f"{command} is of one; allowed: {command} stage=NAME"
            )
    is_sweep = given.multirun or "hydra.mode=MULTIRUN" in given.overrides
    is_printed = given.cfg or given.info or given.help or given.hydra_help
    for word in given.overrides:
        if word in PLUGINS and find_spec(PLUGINS[word]) is None:
            raise ConfigError(
                f"{word} needs {PLUGINS[word]}, which is not installed; "
                "pip install 'lightning-rlhf[sweeps]'"
            )
        if key_of(word) in ("hydra/launcher", "hydra/sweeper") and not is_sweep and not is_printed:
            print_line(f"warning: {word} is for sweeps and is not used without -m", "yellow")
        if word == "hydra/launcher=submitit_slurm" and is_sweep and which("srun") is None:
            raise ConfigError(
                f"{word} needs Slurm, and there is no srun on this machine; allowed: a machine of "
                "the cluster, or hydra/launcher=joblib, submitit_local or basic"
            )
    if is_sweep:
        refuse_processes("a sweep")


def refuse_processes(what: str) -> None:
    """Raise ConfigError where several processes would each run all jobs of a sweep or a recipe."""
    if (place := world()).size > 1:
        raise ConfigError(
            f"{place.launcher} has started {place.size} processes, but {what} starts the processes "
            "of its jobs itself, by trainer.devices; allowed: one stage a command"
        )


def parse_arguments(words: Sequence[str]) -> Namespace:
    """Return Hydra's options and, in `overrides`, all other arguments in their order.

    Hydra's own call of the parser accepts overrides only on one side of the options.

    Raises ConfigError where an option is unknown or its value is wrong.
    """

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; allowed: KEY=VALUE without -, or an option of --hydra-help")

    parser = get_args_parser()
    parser.error = lambda message: refuse(without_secrets(message, words))  # type: ignore
    # --info has an optional value, and the parser would take an override for it.
    arguments = [
        "--info=all" if word in ("--info", "-i") and "=" in after else word
        for word, after in zip(words, [*words[1:], ""], strict=False)
    ]
    given, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        refuse(f"{without_address(unknown[0])} is no option")
    return given


def options_last(words: Sequence[str], given: Namespace) -> list[str]:
    """Return the arguments of a command with its overrides first, as Hydra's parser needs them."""
    return [*given.overrides, *(word for word in words if word not in given.overrides)]


def parse_overrides(words: Iterable[str]) -> list[Override]:
    """Return the overrides as Hydra parses them."""
    return OverridesParser.create().parse_overrides(list(words))


def key_of(override: str) -> str:
    """Return the key of an override: ppo.lr for ++ppo.lr=1."""
    return override.lstrip("+~").split("=")[0]


def stage_of(override: Override, stages: Collection[str]) -> str | None:
    """Return which of `stages` has the section that the override changes, None where none has."""
    key = override.package or READ_BY.get(override.key_or_group, override.key_or_group)
    section = key.partition(".")[0]
    return section if section in stages else None


def refuse_other_stages(stage: str, words: Sequence[str], stages: Collection[str]) -> None:
    """Raise ConfigError where an override sets a key that only another of `stages` reads."""
    for override in parse_overrides(words):
        owner = stage_of(override, stages)
        if owner not in (None, stage):
            key = override.key_or_group
            message = (
                f"stage={stage} does not read {f'{owner}.{key}' if key in READ_BY else key}; "
                f"leave out {without_address(override.input_line or key)}, or give it to "
                f"stage={owner}"
            )
            if key in READ_BY and not (CONF / "stages" / f"{stage}.yaml").is_file():
                message += f"; a stage of your own built on {owner} takes {key}@{stage}=NAME"
            raise ConfigError(message)


def search_path() -> list[str]:
    """Return the overrides that name further configuration folders, as given."""
    given: Any = OmegaConf.to_container(HydraConfig.get().overrides.hydra)
    return [word for word in given if key_of(word) == "hydra.searchpath"]


def refuse_absent_callbacks(words: Sequence[str]) -> None:
    """Raise ConfigError where `callbacks.NAME=null` leaves out a callback that is not there.

    words: overrides of a job; the configuration is composed from the others.
    """
    absent = {
        override.input_line: override.key_or_group.removeprefix("callbacks.")
        for override in parse_overrides(words)
        if re.fullmatch(r"callbacks\.[^.]+", override.key_or_group)
        and not override.is_delete()
        and override.value() is None
    }
    if not absent:
        return
    rest = [word for word in words if word not in absent]
    there = compose(HydraConfig.get().job.config_name, [*search_path(), *rest]).callbacks
    for line, name in absent.items():
        if name not in there:
            names = ", ".join(f"callbacks.{known}=null" for known in there)
            raise ConfigError(
                f"{line} leaves out a callback that is not there; allowed: "
                f"{names or 'a name in the file that callbacks=NAME chooses, and it chooses none'}"
            )


def completed_stages(given: Namespace) -> list[str]:
    """Return the completions of `stage=` if the shell asks for them; Hydra knows no choices."""
    if not given.shell_completion or "COMP_LINE" not in os.environ:
        return []
    if not os.environ["COMP_LINE"].split(" ")[-1].startswith("stage="):
        return []
    return sorted(f"stage={path.stem}" for path in (CONF / "stages").glob("*.yaml"))


def check_stage(stage: Any, tree: Mapping[Any, Any], sources: Iterable[Any]) -> None:
    """Raise ConfigError where the section of the chosen stage lies in a folder and is not added.

    tree: the composed configuration.
    sources: `hydra.runtime.config_sources`, the folders from which it was composed.
    """
    folders = [Path(source.path) / "stages" for source in sources if source.schema == "file"]
    known = {file.stem for folder in folders for file in folder.glob("*.yaml")}
    if stage not in tree and stage in known:
        raise ConfigError(
            f"stage={stage} chooses a section that is not part of the configuration; add "
            f"+stages={stage}, which reads stages/{stage}.yaml"
        )


def check_choices(choices: Mapping[str, Any]) -> None:
    """Raise ConfigError where a choice names its file by a path, as model=../model/tiny does.

    Hydra would find the file, but not the values stored under the name of the choice.
    """
    for group in GROUPS:
        choice = choices.get(group)
        if isinstance(choice, str) and CHOICE.fullmatch(choice) is None:
            allowed = GlobalHydra.instance().config_loader().get_group_options(group)
            raise ConfigError(f"{group}={choice} is not known; allowed: {', '.join(allowed)}")
